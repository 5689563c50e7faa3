// The live view: memory, the prefix tree and the batch, drawn from /ui/state.
//
// A span of the tree is a box. Its width grows with its tokens, its children stand to its right, and its height is that of
// all that grows from it: what two requests share is one box with both of them behind it.

import { $, make, number, plural } from "./dom.js";

const LEAF = 22;
const GAP = 3;
const LEAST = 20;
const SECONDS = 60;

export class LiveView {
  constructor(isOwn) {
    this.isOwn = isOwn;
    this.boxes = new Map();
    this.rows = new Map();
    this.speeds = [];
    this.before = null;
    this.lit = "";
    this.state = null;
    new ResizeObserver(() => this.state && this.drawTree(this.state)).observe($("tree"));
  }

  update(state) {
    this.state = state;
    this.drawNumbers(state);
    this.drawPool(state.pages);
    this.drawTree(state);
    this.drawBatch(state);
  }

  drawNumbers(state) {
    const now = performance.now();
    const tokens = state.counters?.output_tokens ?? 0;
    if (this.before && now > this.before.now) {
      const speed = Math.max(0, (tokens - this.before.tokens) / ((now - this.before.now) / 1000));
      this.speeds.push({ now, speed });
    }
    this.before = { now, tokens };
    this.speeds = this.speeds.filter((each) => now - each.now < SECONDS * 1000);
    const recent = this.speeds.slice(-2).map((each) => each.speed);
    const speed = recent.length ? recent.reduce((a, b) => a + b) / recent.length : 0;
    $("n-running").textContent = number(state.running + state.prefilling);
    $("n-waiting").textContent = number(state.queued + state.compiling);
    $("n-speed").textContent = speed < 10 ? speed.toFixed(1) : number(speed);
    $("n-hits").textContent = Math.round(100 * state.cache_hit_rate) + "%";
    this.drawSpark(now);
  }

  drawSpark(now) {
    const most = Math.max(1, ...this.speeds.map((each) => each.speed));
    const points = this.speeds.map((each) => {
      const x = 120 * (1 - (now - each.now) / (SECONDS * 1000));
      return `${x.toFixed(2)},${(23 - (21 * each.speed) / most).toFixed(2)}`;
    });
    const [area, line] = $("spark").children;
    line.setAttribute("d", points.length > 1 ? "M" + points.join("L") : "");
    const left = points.length > 1 ? points[0].split(",")[0] : 0;
    area.setAttribute("d", points.length > 1 ? `M${left},24L${points.join("L")}L120,24Z` : "");
  }

  drawPool(pages) {
    const used = pages.cached - pages.evictable;
    const own = pages.total - pages.free - pages.cached;
    const parts = { used, own, kept: pages.evictable };
    for (const part of $("pool").children) part.style.width = `${(100 * parts[part.className]) / pages.total}%`;
    const tokens = (count) => number(count * pages.page_size);
    $("pool-text").textContent = `${tokens(pages.total - pages.free)} of ${tokens(pages.total)} tokens`;
    $("pool").setAttribute("aria-label",
      `KV memory: ${tokens(used)} tokens in use by requests, ${tokens(own)} private to one, ${tokens(pages.evictable)} kept for reuse, ${tokens(pages.free)} free`);
  }

  // -- the tree ---------------------------------------------------------------------------------

  drawTree(state) {
    const { spans } = state;
    const host = $("tree");
    const below = new Map([[0, []]]);
    for (const span of spans) below.set(span.id, []);
    for (const span of spans) below.get(span.parent)?.push(span);
    for (const list of below.values()) list.sort((a, b) => (b.requests > 0) - (a.requests > 0) || a.id - b.id);
    const places = layout(below, host.clientWidth || 340);
    const seen = new Set();
    for (const span of spans) {
      const place = places.get(span.id);
      if (!place) continue;
      seen.add(span.id);
      this.drawSpan(host, span, place, below.get(span.id).length);
    }
    for (const [id, box] of this.boxes) {
      if (seen.has(id)) continue;
      box.remove();
      this.boxes.delete(id);
    }
    host.style.height = `${Math.max(places.height, LEAF)}px`;
    host.classList.toggle("empty", spans.length === 0);
    const shared = spans.filter((span) => span.requests > 1).reduce((sum, span) => sum + span.tokens * (span.requests - 1), 0);
    const text = [`${plural(spans.length, "span")}${state.more_spans ? " of more" : ""}`];
    if (shared) text.push(`${number(shared)} tokens not stored twice`);
    $("tree-text").textContent = text.join(", ");
  }

  drawSpan(host, span, place, drawn) {
    let box = this.boxes.get(span.id);
    if (!box) {
      box = make("div", { role: "listitem", tabindex: "0", "data-span": span.id },
        make("span", { class: "tokens" }), make("span", { class: "readers" }));
      box.addEventListener("pointerenter", () => this.light(box.dataset.span));
      box.addEventListener("pointerleave", () => this.light(""));
      this.boxes.set(span.id, box);
      host.append(box);
    }
    const kind = span.requests > 1 ? "shared" : span.requests ? "used" : "kept";
    box.className = `span ${kind}${this.lit && this.isAbove(span.id, this.lit) ? " lit" : ""}`;
    box.dataset.requests = span.requests;
    box.dataset.tokens = span.tokens;
    Object.assign(box.style, {
      left: `${place.left}px`, top: `${place.top}px`, width: `${place.width - GAP}px`, height: `${place.height - GAP}px`,
    });
    box.children[0].textContent = place.width > 30 ? number(span.tokens) : "";
    box.children[1].textContent = span.requests > 1 ? `×${span.requests}` : "";
    const hidden = span.children - drawn;
    const about = [
      `${plural(span.tokens, "token")} in ${plural(span.pages, "page")}, up to token ${number(span.depth)}`,
      span.requests ? `read by ${plural(span.requests, "live request")}` : "cached, no request reads it now",
      `found again ${plural(span.hits, "time")}`,
    ];
    if (span.text) about.unshift(span.text.length > 400 ? span.text.slice(0, 400) + "…" : span.text, "");
    if (hidden > 0) about.push(`${plural(hidden, "branch", "branches")} not drawn`);
    box.title = about.join("\n");
    box.setAttribute("aria-label", about.filter(Boolean).join("; "));
  }

  /** Whether span `id` is on the path from the root to the end of `below`. */
  isAbove(id, below) {
    const parents = new Map(this.state.spans.map((span) => [span.id, span.parent]));
    for (let at = Number(below); at; at = parents.get(at) ?? 0) if (at === id) return true;
    return false;
  }

  light(span) {
    this.lit = span;
    for (const [id, box] of this.boxes) box.classList.toggle("lit", span !== "" && this.isAbove(id, span));
  }

  // -- the batch --------------------------------------------------------------------------------

  drawBatch(state) {
    const host = $("batch");
    const longest = Math.max(1, ...state.rows.map((row) => row.prompt_tokens + row.output_tokens));
    const seen = new Set();
    state.rows.forEach((row, at) => {
      const name = `${row.rid}/${at}`;
      seen.add(name);
      let node = this.rows.get(name);
      if (!node) {
        node = batchRow();
        node.addEventListener("pointerenter", () => this.light(node.dataset.span));
        node.addEventListener("pointerleave", () => this.light(""));
        node.addEventListener("focus", () => this.light(node.dataset.span));
        node.addEventListener("blur", () => this.light(""));
        this.rows.set(name, node);
        host.append(node);
      }
      this.drawRow(node, row, longest);
    });
    for (const [name, node] of this.rows) {
      if (seen.has(name)) continue;
      node.remove();
      this.rows.delete(name);
    }
    const more = state.more_rows ? `, ${number(state.more_rows)} more` : "";
    $("batch-text").textContent = state.rows.length ? plural(state.rows.length, "request") + more : "nothing runs";
  }

  drawRow(node, row, longest) {
    node.dataset.span = row.span || "";
    node.dataset.rid = row.rid;
    node.className = `row ${row.phase}`;
    const [name, bar, text] = node.children;
    name.textContent = this.isOwn(row.rid) ? "this page" : row.rid.slice(0, 10);
    const cached = Math.max(0, Math.min(row.cached_tokens, row.prompt_tokens) - row.shared_tokens);
    const shared = Math.min(row.shared_tokens, row.prompt_tokens);
    const parts = { shared, kept: cached, used: Math.max(0, row.prompt_tokens - shared - cached), out: row.output_tokens };
    for (const part of bar.children) part.style.width = `${(100 * parts[part.className]) / longest}%`;
    const doing = { running: `${number(row.output_tokens)} out`, prefilling: "reading", waiting: "waiting", compiling: "compiling" };
    text.textContent = doing[row.phase] ?? row.phase;
    const about = [
      `${plural(row.prompt_tokens, "prompt token")}: ${number(shared)} shared, ${number(cached)} more from the cache`,
      `${plural(row.output_tokens, "token")} out of at most ${number(row.output_limit)}`,
      `${row.phase} for ${row.seconds.toFixed(1)} s`,
    ];
    node.title = about.join("\n");
    node.setAttribute("aria-label", `Request ${row.rid}: ${about.join("; ")}`);
  }
}

function batchRow() {
  const part = (name) => make("i", { class: name });
  return make("li", { tabindex: "0" }, make("code", {}), make("span", { class: "lane" }, part("shared"), part("kept"), part("used"), part("out")),
    make("small", {}));
}

/** Where each box goes: id -> {left, top, width, height}, and the height of all. Widths go with the square root of tokens. */
function layout(below, width) {
  const wide = new Map();
  const reach = (span) => {
    const own = Math.sqrt(span.tokens);
    const most = Math.max(0, ...below.get(span.id).map(reach));
    const steps = 1 + Math.max(0, ...below.get(span.id).map((child) => wide.get(child.id).steps));
    wide.set(span.id, { own, steps });
    return own + most;
  };
  const longest = Math.max(1, ...below.get(0).map(reach));
  const steps = Math.max(1, ...below.get(0).map((span) => wide.get(span.id).steps));
  const least = Math.min(LEAST, width / steps);
  const unit = Math.max(0, width - steps * least) / longest;
  const places = new Map();
  const put = (span, left, top) => {
    const own = least + unit * wide.get(span.id).own;
    let height = 0;
    for (const child of below.get(span.id)) height += put(child, left + own, top + height);
    height = Math.max(height, LEAF);
    places.set(span.id, { left, top, width: own, height });
    return height;
  };
  let top = 0;
  for (const span of below.get(0)) top += put(span, 0, top);
  places.height = top;
  return places;
}
