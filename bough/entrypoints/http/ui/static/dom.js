// Small helpers around the DOM. Nothing here takes HTML: text is always text.

export const $ = (id) => document.getElementById(id);

/** make("button", {class: "quiet", onclick: f, "aria-label": "x"}, child, "text", ...) */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value === "boolean") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const whole = new Intl.NumberFormat("en");
export const number = (value) => whole.format(Math.round(value));

export function plural(count, one, many = one + "s") {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function random(bytes = 8) {
  return Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (b) => b.toString(16).padStart(2, "0")).join("");
}

let fading = 0;
/** Says something for a while. `action`: {label, run}, a button beside it. */
export function toast(text, action) {
  const node = $("toast");
  const hide = () => node.classList.remove("shown", "acts");
  node.replaceChildren(text);
  if (action) {
    const press = () => {
      hide();
      action.run();
    };
    node.append(make("button", { type: "button", class: "undo", onclick: press }, action.label));
  }
  node.classList.toggle("acts", action !== undefined);
  node.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(hide, action ? 10_000 : 3500);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // not allowed on plain-HTTP addresses other than this machine's: the old way still is
    const area = make("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("Copied");
}

export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** What the browser keeps, where it may. Every name is the page's own. */
export const kept = {
  read(name, fallback) {
    try {
      const text = localStorage.getItem("bough." + name);
      return text === null ? fallback : JSON.parse(text);
    } catch {
      return fallback;
    }
  },
  write(name, value) {
    try {
      if (value === undefined) localStorage.removeItem("bough." + name);
      else localStorage.setItem("bough." + name, JSON.stringify(value));
    } catch {
      // full or switched off: the page works without
    }
  },
};
