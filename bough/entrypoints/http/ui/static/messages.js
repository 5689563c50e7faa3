// Messages on the page. Each has one element, updated in place while its answer streams.

import { Conversation } from "./conversation.js";
import { copy, make, number } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

/** Draws a conversation into `host`. `act` has what the buttons do: edit, regenerate, retry, remove, result, pick. */
export class MessageList {
  constructor(host, act) {
    this.host = host;
    this.act = act;
    this.views = new Map();
  }

  /** Brings the page in line with the messages. */
  show(messages, busy) {
    for (const [message, view] of this.views) {
      if (!messages.includes(message)) {
        view.node.remove();
        this.views.delete(message);
      }
    }
    messages.forEach((message, at) => {
      let view = this.views.get(message);
      if (!view) {
        view = message.role === "assistant" ? new AnswerView(message, this.act) : new PlainView(message, this.act);
        this.views.set(message, view);
      }
      if (this.host.children[at] !== view.node) this.host.insertBefore(view.node, this.host.children[at] ?? null);
      view.show(busy && at === messages.length - 1);
    });
  }

  update(message, streaming) {
    this.views.get(message)?.show(streaming);
  }

  edit(message) {
    this.views.get(message)?.edit?.();
  }
}

function action(label, title, onclick) {
  return make("button", { type: "button", class: "quiet small", title, onclick }, label);
}

/** What a user or a tool said. */
class PlainView {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.body = make("div", { class: "said" });
    this.tools = make("div", { class: "actions" });
    const who = message.role === "tool" ? `Result of ${message.name || "a tool"}` : "You";
    this.node = make("article", { class: `message ${message.role}`, "aria-label": who },
      message.role === "tool" ? make("div", { class: "who" }, who) : null, this.body, this.tools);
    this.draw();
  }

  show() {}

  draw() {
    const { message, act } = this;
    const images = (message.images ?? []).map((url) => make("img", { src: url, alt: "attached image", class: "attached" }));
    this.body.replaceChildren(...images, make("div", { class: "plain" }, message.text));
    this.tools.replaceChildren(
      action("Copy", "Copy this message", () => copy(message.text)),
      action("Edit", "Change this message and ask again", () => this.edit()),
      action("Delete", "Remove this message and what follows", () => act.remove(message)),
    );
  }

  edit() {
    const box = make("textarea", { class: "edit", "aria-label": "Edit message", rows: Math.min(12, this.message.text.split("\n").length + 1) });
    box.value = this.message.text;
    const done = (send) => {
      const text = box.value;
      this.draw();
      if (send && text.trim()) this.act.edit(this.message, text);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done(false);
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done(true);
      }
      event.stopPropagation();
    });
    this.body.replaceChildren(box);
    this.tools.replaceChildren(
      make("button", { type: "button", class: "primary small", onclick: () => done(true) }, "Send again"),
      action("Cancel", "Leave it as it was", () => done(false)),
    );
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

/** What the model said: reasoning (folded), text, calls, and how fast it was. */
class AnswerView {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.summary = make("summary");
    this.reasoning = make("div", { class: "reasoning-text" });
    this.fold = make("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.text = make("div", { class: "markdown" });
    this.calls = make("div", { class: "calls" });
    this.error = make("div", { class: "error", role: "alert", hidden: true });
    this.pager = make("span", { class: "pager" });
    this.stats = make("span", { class: "stats" });
    this.tools = make("div", { class: "actions" });
    this.node = make("article", { class: "message assistant", "aria-label": "Answer" },
      this.fold, this.text, this.calls, this.error, make("div", { class: "foot" }, this.pager, this.stats, this.tools));
    this.shown = null;
  }

  show(streaming) {
    const { message } = this;
    const answer = Conversation.answer(message);
    if (!answer) return;
    if (this.shown !== answer) {
      this.shown = answer;
      this.calls.replaceChildren();
      this.fold.open = false;
    }
    const working = streaming && !answer.finish;
    this.node.classList.toggle("working", working);
    this.node.classList.toggle("waiting", working && !answer.text && !answer.reasoning && !answer.calls.length);
    this.node.setAttribute("aria-busy", String(working));
    this.showReasoning(answer, working);
    renderMarkdown(this.text, asCodeIfJson(answer, working));
    this.showCalls(answer, working);
    this.error.hidden = !answer.error;
    if (answer.error) {
      const again = make("button", { type: "button", class: "quiet small", onclick: () => this.act.retry(message) }, "Try again");
      this.error.replaceChildren(make("span", {}, answer.error), again);
    }
    this.showFoot(answer, working);
  }

  showReasoning(answer, working) {
    this.fold.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    const words = answer.reasoning.trim().split(/\s+/).length;
    const thinking = working && !answer.text && !answer.calls.length;
    this.summary.textContent = thinking ? `Thinking… (${number(words)} words)` : `Thought for ${number(words)} words`;
    this.summary.classList.toggle("live", thinking);
    renderMarkdown(this.reasoning, answer.reasoning);
  }

  showCalls(answer, working) {
    answer.calls.forEach((call, at) => {
      let card = this.calls.children[at];
      if (!card) {
        card = this.card(answer, call);
        this.calls.append(card);
      }
      card.querySelector(".call-name").textContent = call.name;
      card.querySelector("pre").textContent = pretty(call.arguments) ?? call.arguments;
      card.querySelector(".result").hidden = working || this.act.hasResult(this.message, call);
    });
  }

  card(answer, call) {
    const box = make("textarea", { rows: "2", placeholder: "What the tool returns", "aria-label": `Result of ${call.name}` });
    const send = make("button", { type: "button", class: "quiet small", onclick: () => this.act.result(this.message, call, box.value) }, "Send result");
    return make("div", { class: "call" }, make("div", { class: "call-head" }, "calls ", make("b", { class: "call-name" })),
      make("pre", { tabindex: "0" }), make("div", { class: "result", hidden: true }, box, send));
  }

  showFoot(answer, working) {
    const { message, act } = this;
    const many = message.variants.length;
    const move = (step) => act.pick(message, (message.at + step + many) % many);
    this.pager.replaceChildren(...(many < 2 ? [] : [
      make("button", { type: "button", class: "quiet small", "aria-label": "Previous answer", onclick: () => move(-1) }, "‹"),
      make("span", {}, `${message.at + 1} of ${many}`),
      make("button", { type: "button", class: "quiet small", "aria-label": "Next answer", onclick: () => move(1) }, "›"),
    ]));
    this.stats.textContent = statistics(answer, working);
    if (this.tools.childElementCount === 0) {
      this.tools.append(
        action("Copy", "Copy this answer", () => copy(Conversation.answer(message).text)),
        action("Again", "Ask once more and keep both answers", () => act.regenerate(message)),
        action("Delete", "Remove this answer and what follows", () => act.remove(message)),
      );
    }
    this.tools.hidden = working;
  }
}

/** An answer that is JSON, or was asked to be, as a block of code; any other as it is. */
function asCodeIfJson(answer, working) {
  const { text } = answer;
  const isJson = !working && /^\s*[[{]/.test(text) && pretty(text) !== null;
  if (!isJson && !(answer.asksJson && text)) return text;
  const shown = (isJson && pretty(text)) || text;
  const marks = "`".repeat(3 + Math.max(0, ...[...text.matchAll(/`+/g)].map((run) => run[0].length)));
  return `${marks}json\n${shown}${working ? "" : `\n${marks}`}`;
}

/** JSON with its lines broken; null if it is none. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

const ENDS = { length: "cut at the longest answer", tool_calls: "wants a tool's result", stopped: "stopped", content_filter: "filtered", abort: "aborted" };

function statistics(answer, working) {
  const { stats } = answer;
  const parts = [];
  if (stats) {
    parts.push(`first token ${stats.ttft < 1000 ? Math.round(stats.ttft) + " ms" : (stats.ttft / 1000).toFixed(1) + " s"}`);
    if (stats.speed) parts.push(`${stats.speed.toFixed(1)} tok/s`);
    if (stats.perStep) parts.push(`${stats.perStep.toFixed(2)} tokens per step`);
    parts.push(`${stats.exact || working ? "" : "≈ "}${number(stats.tokens)} tokens`);
    if (stats.prompt) parts.push(`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`);
  }
  if (!working && ENDS[answer.finish]) parts.push(ENDS[answer.finish]);
  if (!working && answer.json !== undefined) parts.push(answer.json ? "valid JSON" : "not valid JSON");
  return parts.join(" · ");
}
