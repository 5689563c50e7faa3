// KaTeX and highlight.js, which lie in vendor/ and are loaded when an answer first needs them. Without them text stays text.

let math = null;
let colours = null;

function element(tag, attributes) {
  return new Promise((done, failed) => {
    const node = Object.assign(document.createElement(tag), attributes);
    node.addEventListener("load", () => done());
    node.addEventListener("error", () => failed(new Error(`${attributes.src ?? attributes.href} can't be loaded`)));
    document.head.append(node);
  });
}

const KATEX = { throwOnError: false, trust: false, strict: "ignore", maxExpand: 300, maxSize: 20 };

/** Shows a formula in `node`, which holds its source until then. */
export async function showFormula(node, source, display) {
  try {
    math ??= Promise.all([
      element("link", { rel: "stylesheet", href: "vendor/katex/katex.min.css" }),
      element("script", { src: "vendor/katex/katex.min.js" }),
    ]);
    await math;
    window.katex.render(source, node, { ...KATEX, displayMode: display });
    node.classList.add("drawn");
  } catch {
    // the source is readable too
  }
}

/** Colours the program in `node`, if its language is known. */
export async function highlight(node, text, language) {
  try {
    colours ??= import("./vendor/highlight/highlight.min.js");
    const { default: hljs } = await colours;
    const name = language.toLowerCase();
    if (!hljs.getLanguage(name)) return;
    const { value } = hljs.highlight(text, { language: name, ignoreIllegals: true });
    node.replaceChildren(...pieces(new DOMParser().parseFromString(value, "text/html").body));
    node.classList.add("coloured");
  } catch {
    // it stays black and white
  }
}

/** Text and spans with highlight.js's classes. Whatever else there may be becomes its text. */
function pieces(from) {
  return [...from.childNodes].map((node) => {
    if (node.nodeName !== "SPAN") return document.createTextNode(node.textContent);
    const span = document.createElement("span");
    span.className = [...node.classList].filter((name) => /^[\w-]+$/.test(name)).join(" ");
    span.append(...pieces(node));
    return span;
  });
}
