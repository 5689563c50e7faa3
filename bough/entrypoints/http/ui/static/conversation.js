// The conversation: its messages, how they become a request, and what a stream adds to them.
//
// user:      {role, text, images: [data URL]}
// assistant: {role, variants: [{text, reasoning, calls: [{id, name, arguments}], finish, error, stats}], at}
// tool:      {role, callId, name, text}

import { credentials, own, root, stream } from "./api.js";
import { random } from "./dom.js";
import { requestFields, settings, wantsJson } from "./settings.js";

const fresh = () => ({ text: "", reasoning: "", calls: [], finish: "", error: "", stats: null, asksJson: false });

export class Conversation {
  constructor() {
    this.messages = [];
    this.rids = new Set();
    this.running = null;
    this.onChange = () => {};
  }

  get busy() {
    return this.running !== null;
  }

  clear() {
    this.stop();
    this.messages = [];
  }

  stop() {
    this.running?.abort();
  }

  /** The answer that a message holds: the variant in view. */
  static answer(message) {
    return message.variants[message.at];
  }

  /** Messages as the API takes them. */
  toApi(messages) {
    const out = settings.systemMessage ? [{ role: "system", content: settings.systemMessage }] : [];
    for (const message of messages) {
      if (message.role === "user") out.push({ role: "user", content: userContent(message) });
      else if (message.role === "tool") out.push({ role: "tool", tool_call_id: message.callId, content: message.text });
      else {
        const { text, calls, error } = Conversation.answer(message);
        if (error && !text && !calls.length) continue;
        const said = { role: "assistant", content: text };
        if (calls.length) {
          said.tool_calls = calls.map((call) => ({
            id: call.id,
            type: "function",
            function: { name: call.name, arguments: call.arguments || "{}" },
          }));
        }
        out.push(said);
      }
    }
    return out;
  }

  body(model, messages) {
    return { model, messages: this.toApi(messages), ...requestFields() };
  }

  /** Answers the messages before `at` with new variants of the message at `at`. Throws what settings say before it starts. */
  async generate(model, at = this.messages.length) {
    const body = { ...this.body(model, this.messages.slice(0, at)), stream: true, stream_options: { include_usage: true } };
    if (own) {
      body.return_meta_info = true;
      body.rid = "ui-" + random();
      this.rids.add(body.rid);
    }
    const message = this.messages[at] ?? { role: "assistant", variants: [], at: 0 };
    this.messages[at] = message;
    const first = message.variants.length;
    const added = Array.from({ length: body.n ?? 1 }, () => ({ ...fresh(), asksJson: wantsJson() }));
    message.variants.push(...added);
    message.at = first;
    this.running = new AbortController();
    const timer = new Timer(added);
    this.onChange(message, true);
    try {
      for await (const chunk of stream(new URL("chat/completions", root), body, this.running.signal)) {
        take(chunk, added, timer);
        this.onChange(message, false);
      }
      timer.end();
    } catch (error) {
      timer.end();
      for (const variant of added.filter((each) => !each.finish)) {
        if (error.name === "AbortError") variant.finish = "stopped";
        else Object.assign(variant, { finish: "error", error: explain(error) });
      }
      if (error.status === 401) this.onKeyNeeded?.();
    } finally {
      this.running = null;
      this.rids.delete(body.rid);
      this.onChange(message, true);
    }
  }

  export() {
    return JSON.stringify({ format: "bough-conversation", version: 1, messages: this.messages, settings: settings.all }, null, 2);
  }

  /** Replaces everything with what a file says; OpenAI's plain list of messages works too. */
  import(text) {
    const given = JSON.parse(text);
    const list = Array.isArray(given) ? given : given.messages;
    if (!Array.isArray(list)) throw new Error("it has no list of messages");
    const read = list.map(readMessage).filter(Boolean);
    this.clear();
    this.messages = read;
    const system = list.find((message) => message.role === "system");
    settings.take(given.settings ?? (typeof system?.content === "string" ? { system: system.content } : {}));
  }
}

function userContent(message) {
  if (!message.images?.length) return message.text;
  return [...message.images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: message.text }];
}

const string = (value) => (typeof value === "string" ? value : "");

function readMessage(given) {
  if (given?.role === "user") {
    const parts = Array.isArray(given.content) ? given.content : [];
    const text = string(given.text) || string(given.content) || parts.map((part) => string(part.text)).join("");
    const images = [...(given.images ?? []), ...parts.map((part) => part.image_url?.url)].filter((url) => string(url).startsWith("data:image/"));
    return { role: "user", text, images };
  }
  if (given?.role === "tool") {
    return { role: "tool", callId: string(given.callId ?? given.tool_call_id), name: string(given.name), text: string(given.text ?? given.content) };
  }
  if (given?.role !== "assistant") return null;
  const variants = (Array.isArray(given.variants) && given.variants.length ? given.variants : [given]).map((each) => ({
    ...fresh(),
    text: string(each.text ?? each.content),
    reasoning: string(each.reasoning ?? each.reasoning_content),
    calls: (each.calls ?? each.tool_calls ?? []).map((call) => ({
      id: string(call.id),
      name: string(call.name ?? call.function?.name),
      arguments: string(call.arguments ?? call.function?.arguments),
    })),
    finish: string(each.finish) || "stop",
    error: string(each.error),
    asksJson: each.asksJson === true,
    stats: each.stats && typeof each.stats === "object" ? each.stats : null,
  }));
  return { role: "assistant", variants, at: Math.min(Math.max(0, given.at | 0), variants.length - 1) };
}

function explain(error) {
  if (error.status !== undefined) return error.message;
  return `The server can't be reached (${error.message}).`;
}

/** When each variant began and ended, and how many chunks it had. */
class Timer {
  constructor(variants) {
    this.variants = variants;
    this.begun = performance.now();
    this.first = variants.map(() => 0);
    this.last = variants.map(() => 0);
    this.chunks = variants.map(() => 0);
    this.usage = null;
    this.perStep = variants.map(() => 0);
  }

  tick(at) {
    const now = performance.now();
    this.first[at] ||= now;
    this.last[at] = now;
    this.chunks[at]++;
    this.show(at);
  }

  end() {
    this.variants.forEach((_, at) => this.first[at] && this.show(at));
  }

  show(at) {
    const all = this.chunks.reduce((sum, count) => sum + count, 0);
    const exact = this.usage !== null && this.variants.length === 1;
    const tokens = this.usage === null ? this.chunks[at] : Math.round((this.usage.completion_tokens * this.chunks[at]) / all);
    const seconds = (this.last[at] - this.first[at]) / 1000;
    this.variants[at].stats = {
      ttft: this.first[at] - this.begun,
      speed: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0,
      tokens,
      exact,
      perStep: this.perStep[at],
      prompt: this.usage?.prompt_tokens ?? 0,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }
}

/** Adds what a chunk says to the variants it is about. */
function take(chunk, variants, timer) {
  if (chunk.usage) timer.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) {
    const variant = variants[choice.index];
    if (!variant) continue;
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
    if (content) variant.text += content;
    if (reasoning_content ?? reasoning) variant.reasoning += reasoning_content ?? reasoning;
    for (const part of tool_calls ?? []) {
      const call = (variant.calls[part.index] ??= { id: "", name: "", arguments: "" });
      if (part.id) call.id = part.id;
      if (part.function?.name) call.name += part.function.name;
      if (part.function?.arguments) call.arguments += part.function.arguments;
    }
    if (content || reasoning_content || reasoning || tool_calls) timer.tick(choice.index);
    if (choice.finish_reason) variant.finish = choice.finish_reason;
    if (choice.meta_info?.spec_verify_ct) timer.perStep[choice.index] = choice.meta_info.spec_accept_length;
  }
}

/** The request as a command or a program. The key is never in it. */
export function asCode(kind, body) {
  const url = root.href.replace(/\/$/, "");
  const needsKey = credentials.key !== "";
  if (kind === "curl") {
    const key = needsKey ? ' \\\n  -H "authorization: Bearer $API_KEY"' : "";
    const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
    return `curl ${url}/chat/completions \\\n  -H 'content-type: application/json'${key} \\\n  -d '${data}'`;
  }
  const known = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "n", "frequency_penalty", "presence_penalty", "stop", "response_format", "tools", "tool_choice"];
  const lines = Object.entries(body).filter(([name]) => known.includes(name)).map(([name, value]) => `    ${name}=${python(value)},`);
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.includes(name)));
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
  return [
    ...(needsKey ? ["import os", ""] : []),
    "import openai",
    "",
    `client = openai.OpenAI(base_url="${url}", api_key=${needsKey ? 'os.environ["API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message)",
  ].join("\n");
}

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
