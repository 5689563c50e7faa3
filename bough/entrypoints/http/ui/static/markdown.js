// Markdown to DOM nodes. Text only ever becomes text nodes, links only http(s) and mailto, so a model can't inject anything.

import { copy, make } from "./dom.js";

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
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

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
    if (fence) {
      let to = at + 1;
      const close = new RegExp("^ {0,3}" + (fence[1][0] === "~" ? "~" : "`") + `{${fence[1].length},} *$`);
      while (to < lines.length && !close.test(lines[to])) to++;
      take("code", at, Math.min(to + 1, lines.length), { language: fence[2], closed: to < lines.length });
    } else if (HEADING.test(line)) take("heading", at, at + 1);
    else if (RULE.test(line)) take("rule", at, at + 1);
    else if (QUOTE.test(line)) take("quote", at, run(lines, at, (l) => QUOTE.test(l)));
    else if (ITEM.test(line)) take("list", at, run(lines, at, (l, i) => ITEM.test(l) || inItem(lines, l, i)));
    else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
      take("table", at, run(lines, at, (l) => l.includes("|")));
    } else take("text", at, run(lines, at, (l, i) => i === at || !starts(l)));
  }
  return found;
}

function run(lines, from, belongs) {
  let to = from + 1;
  while (to < lines.length && belongs(lines[to], to)) to++;
  return to;
}

const starts = (line) => !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((mark) => mark.test(line));

function inItem(lines, line, at) {
  if (line.trim()) return /^\s{2,}/.test(line) || !starts(line);
  const next = lines[at + 1] ?? "";
  return ITEM.test(next) || /^\s{2,}\S/.test(next);
}

function build(block) {
  const { kind, lines } = block;
  switch (kind) {
    case "code":
      return code(lines.slice(1, block.closed ? -1 : undefined).join("\n"), block.language);
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
      return paragraph(lines);
  }
}

function paragraph(lines) {
  const node = make("p");
  lines.forEach((line, at) => {
    if (at) node.append(/ {2}$|\\$/.test(lines[at - 1]) ? make("br") : "\n");
    inline(node, line.replace(/\\$/, "").trim());
  });
  return node;
}

function code(text, language) {
  const button = make("button", { type: "button", class: "quiet small", onclick: () => copy(text) }, "Copy");
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), button);
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = make(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(first[2], 10);
  let item = [];
  const flush = () => {
    if (!item.length) return;
    const entry = make("li");
    const below = item.slice(1).map((line) => line.replace(new RegExp(`^\\s{0,${indent + 2}}`), ""));
    const nested = below.findIndex((line) => ITEM.test(line) || FENCE.test(line) || !line.trim());
    const own = nested < 0 ? below : below.slice(0, nested);
    inline(entry, [item[0], ...own].join(" ").trim());
    if (nested >= 0) {
      const inner = make("div", { class: "inner" });
      renderMarkdown(inner, below.slice(nested).join("\n"));
      entry.append(inner);
    }
    node.append(entry);
    item = [];
  };
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && mark[1].length <= indent + 1) {
      flush();
      item = [mark[3]];
    } else item.push(line);
  }
  flush();
  return node;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const head = make("tr", {}, ...cells(lines[0]).map((cell) => inline(make("th"), cell)));
  const body = lines.slice(2).map((line) => make("tr", {}, ...cells(line).map((cell) => inline(make("td"), cell))));
  return make("div", { class: "table" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

const INLINE =
  /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|__(?=\S)([^]*?\S)__|~~(?=\S)([^]*?\S)~~|\*(?=[^\s*])([^*]*?[^\s*])\*|\b_(?=[^\s_])([^_]*?[^\s_])_\b|\[([^\]\n]{1,500})\]\(([^\s()]{1,2000}(?:\([^\s()]*\)[^\s()]*)?)\)|(https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])/;

function inline(host, text, depth = 0) {
  let rest = text;
  while (rest) {
    const found = depth < 6 ? INLINE.exec(rest) : null;
    if (!found) {
      host.append(rest);
      break;
    }
    if (found.index) host.append(rest.slice(0, found.index));
    host.append(piece(found, depth));
    rest = rest.slice(found.index + found[0].length);
  }
  return host;
}

function piece(found, depth) {
  const [whole, ticks, literal, strong, strong2, struck, soft, soft2, label, target, bare] = found;
  if (ticks) return make("code", {}, literal.trim() || literal);
  if (strong ?? strong2) return inline(make("strong"), strong ?? strong2, depth + 1);
  if (struck) return inline(make("del"), struck, depth + 1);
  if (soft ?? soft2) return inline(make("em"), soft ?? soft2, depth + 1);
  const url = target ?? bare;
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return document.createTextNode(whole);
  return inline(make("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }), label ?? bare, 9);
}
