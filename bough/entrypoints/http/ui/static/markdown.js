// Markdown to DOM nodes. Text only ever becomes text nodes, links only http(s) and mailto, so a model can't inject anything.

import { copy, make } from "./dom.js";
import { highlight, showFormula } from "./vendor.js";

/** Shows `text` in `host`, touching only the blocks that changed since the last time. */
export function renderMarkdown(host, text) {
  const shown = host.blocks ?? [];
  const wanted = blocks(text);
  let same = 0;
  while (same < shown.length && same < wanted.length && shown[same].source === wanted[same].source) same++;
  for (const old of shown.slice(same)) old.node.remove();
  const kept = shown.slice(0, same);
  for (const block of wanted.slice(same)) {
    const node = build(block);
    host.append(node);
    kept.push({ source: block.source, node });
  }
  host.blocks = kept;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const FORMULA = /^\s*(\$\$|\\\[)/;
const CLOSES = { $$: /\$\$\s*$/, "\\[": /\\\]\s*$/ };

const isOrdered = (item) => /\d/.test(item[2]);

function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (kind, from, to, more = {}) => {
    found.push({ kind, lines: lines.slice(from, to), source: kind + "\n" + lines.slice(from, to).join("\n"), ...more });
    at = to;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at++;
      continue;
    }
    const fence = FENCE.exec(line);
    const item = ITEM.exec(line);
    const formula = formulaEnd(lines, at);
    if (fence) {
      let to = at + 1;
      const close = new RegExp("^ {0,3}" + (fence[1][0] === "~" ? "~" : "`") + `{${fence[1].length},} *$`);
      while (to < lines.length && !close.test(lines[to])) to++;
      take("code", at, Math.min(to + 1, lines.length), { language: fence[2], closed: to < lines.length });
    } else if (formula) take("formula", at, formula);
    else if (HEADING.test(line)) take("heading", at, at + 1);
    else if (RULE.test(line)) take("rule", at, at + 1);
    else if (QUOTE.test(line)) take("quote", at, run(lines, at, (l) => QUOTE.test(l)));
    else if (item) take("list", at, run(lines, at, (l, i) => inList(lines, l, i, item)));
    else if (isTable(lines, at)) take("table", at, run(lines, at, (l, i) => i === at + 1 || (l.includes("|") && !starts(l))));
    else take("text", at, run(lines, at, (l, i) => !starts(l) && !formulaEnd(lines, i) && !isTable(lines, i)));
  }
  return found;
}

function run(lines, from, belongs) {
  let to = from + 1;
  while (to < lines.length && belongs(lines[to], to)) to++;
  return to;
}

const starts = (line) => !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((mark) => mark.test(line));

/** The line after a formula that stands by itself, or 0 if none begins here. One that has no end yet is text. */
function formulaEnd(lines, at) {
  const begin = FORMULA.exec(lines[at]);
  if (!begin) return 0;
  const close = CLOSES[begin[1]];
  if (close.test(lines[at].slice(begin[0].length))) return at + 1;
  if (lines[at].slice(begin[0].length).includes(begin[1] === "$$" ? "$$" : "\\]")) return 0; // text goes on behind it
  for (let to = at + 1; to < lines.length && lines[to].trim(); to++) if (close.test(lines[to])) return to + 1;
  return 0;
}

/** Whether a line goes on with the list that `first` began: another item, something below one, or its text broken. */
function inList(lines, line, at, first) {
  const item = ITEM.exec(line);
  if (item && item[1].length <= first[1].length + 1) return isOrdered(item) === isOrdered(first) && !RULE.test(line);
  if (item) return true;
  if (line.trim()) return /^\s{2,}/.test(line) || (!starts(line) && lines[at - 1].trim() !== "");
  const after = lines.slice(at + 1).find((each) => each.trim()) ?? "";
  const next = ITEM.exec(after);
  if (next && next[1].length <= first[1].length + 1) return isOrdered(next) === isOrdered(first) && !RULE.test(after);
  return next !== null || /^\s{2,}\S/.test(after);
}

function isTable(lines, at) {
  const rule = lines[at + 1] ?? "";
  return lines[at].includes("|") && TABLE_RULE.test(rule) && rule.includes("-") && cells(rule).length === cells(lines[at]).length;
}

function build(block) {
  const { kind, lines } = block;
  switch (kind) {
    case "code":
      return code(lines.slice(1, block.closed ? -1 : undefined).join("\n"), block.language, block.closed);
    case "formula": {
      const source = lines.join("\n").trim().slice(2, -2);
      return formula(make("div", { class: "formula", tabindex: "0" }, lines.join("\n")), source, true);
    }
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      return inline(make("h" + Math.min(6, marks.length + 2)), text);
    }
    case "rule":
      return make("hr");
    case "quote": {
      const host = make("blockquote");
      renderMarkdown(host, lines.map((line) => line.replace(QUOTE, "")).join("\n"));
      return host;
    }
    case "list":
      return list(lines);
    case "table":
      return table(lines);
    default:
      return paragraph(make("p"), lines);
  }
}

function formula(node, source, display) {
  showFormula(node, source, display);
  return node;
}

function paragraph(node, lines) {
  const text = lines.map((line) => line.replace(/^\s+/, "")).join("\n").trimEnd();
  text.split(/(?: {2,}|\\)\n/).forEach((part, at) => {
    if (at) node.append(make("br"));
    inline(node, part);
  });
  return node;
}

function code(text, language, closed) {
  const button = make("button", { type: "button", class: "quiet small", onclick: () => copy(text) }, "Copy");
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), button);
  const body = make("code", {}, text);
  if (closed && language) highlight(body, text, language);
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, body));
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const items = [];
  let inFence = false;
  for (const line of lines) {
    const mark = inFence ? null : ITEM.exec(line);
    if (mark && mark[1].length <= first[1].length + 1) {
      items.push({ offset: mark[1].length + mark[2].length + Math.min(mark[3].length, 4), lines: [mark[4]] });
    } else {
      const item = items.at(-1);
      item.lines.push(line.replace(new RegExp(`^\\s{0,${item.offset}}`), ""));
    }
    if (/^\s*(`{3,}|~{3,})/.test(mark ? mark[4] : line)) inFence = !inFence;
  }
  const isLoose = items.some((item, at) => {
    const text = item.lines.join("\n");
    return (at < items.length - 1 && /\n\s*$/.test(text)) || /\S\n\s*\n\S/.test(text);
  });
  const node = make(isOrdered(first) ? "ol" : "ul", {}, ...items.map((item) => entry(item.lines, isLoose)));
  if (isOrdered(first)) node.start = parseInt(first[2], 10);
  return node;
}

function entry(lines, isLoose) {
  const task = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
  const node = make("li", { class: task ? "task" : undefined });
  if (task) {
    const isDone = task[1] !== " ";
    node.append(make("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "open" }), " ");
  }
  const text = [task ? task[2] : lines[0], ...lines.slice(1)].join("\n");
  for (const block of blocks(text)) {
    if (block.kind === "text" && !isLoose) paragraph(node, block.lines);
    else node.append(build(block));
  }
  return node;
}

/** The cells of a row; a bar that is escaped or in a code span is text. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const found = [""];
  for (const [piece] of row.matchAll(/`+[^`]*`+|\\\||\||[^`|\\]+|[^]/g)) {
    if (piece === "|") found.push("");
    else found[found.length - 1] += piece === "\\|" ? "|" : piece;
  }
  return found.map((cell) => cell.trim());
}

function table(lines) {
  const head = cells(lines[0]);
  const sides = cells(lines[1]).map((mark) => (/^:.*:$/.test(mark) ? "middle" : mark.endsWith(":") ? "right" : undefined));
  const row = (tag, given) => make("tr", {}, ...head.map((_, at) => inline(make(tag, { class: sides[at] }), given[at] ?? "")));
  const body = lines.slice(2).map((line) => row("td", cells(line)));
  return make("div", { class: "table" }, make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...body)));
}

const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<literal>[^`]|[^`][^]*?[^`])\k<ticks>(?!`)/,
    /\\\((?<round>[^]+?)\\\)/,
    /\\\[(?<square>[^]+?)\\\]/,
    /\$\$(?<double>[^$]+?)\$\$/,
    /(?<![\\$\w])\$(?=[^\s$])(?<single>(?:\\.|[^$\\\n])*?[^\s\\$])\$(?![\d$])/,
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /\*\*(?=\S)(?<strong>[^]*?\S)\*\*/,
    /\b__(?=\S)(?<strong2>[^]*?\S)__\b/,
    /~~(?=\S)(?<struck>[^]*?\S)~~/,
    /\*(?=[^\s*])(?<soft>[^*]*?[^\s*])\*/,
    /\b_(?=[^\s_])(?<soft2>[^_]*?[^\s_])_\b/,
    /\[(?<label>[^\]\n]{1,500})\]\((?<target>[^\s()]{1,2000}(?:\([^\s()]*\)[^\s()]*)?)\)/,
    /(?<bare>https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])/,
  ].map((each) => each.source).join("|"),
);

function inline(host, text, depth = 0) {
  let rest = text;
  while (rest) {
    const found = depth < 6 ? INLINE.exec(rest) : null;
    if (!found) {
      host.append(rest);
      break;
    }
    if (found.index) host.append(rest.slice(0, found.index));
    host.append(piece(found[0], found.groups, depth));
    rest = rest.slice(found.index + found[0].length);
  }
  return host;
}

function piece(whole, is, depth) {
  if (is.ticks) return make("code", {}, is.literal.trim() || is.literal);
  if (is.escaped) return document.createTextNode(is.escaped);
  const source = is.round ?? is.square ?? is.double ?? is.single;
  if (source) return formula(make("span", { class: "formula" }, whole), source, (is.square ?? is.double) !== undefined);
  const strong = is.strong ?? is.strong2;
  if (strong) return inline(make("strong"), strong, depth + 1);
  if (is.struck) return inline(make("del"), is.struck, depth + 1);
  const soft = is.soft ?? is.soft2;
  if (soft) return inline(make("em"), soft, depth + 1);
  const url = is.target ?? is.bare;
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return document.createTextNode(whole);
  return inline(make("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }), is.label ?? is.bare, 9);
}
