// What the user has set: sampling, output format, tools. Empty means "as the server does it".

import { $, kept, make } from "./dom.js";
import { own } from "./api.js";

/** `ours`: fields that only this server (and its peers) understand. */
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, about: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, about: "sample among the likeliest that make up this share" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, about: "in tokens" },
  { name: "seed", label: "Seed", step: 1, about: "the same seed draws the same answer" },
  { name: "n", label: "Answers at once", min: 1, max: 8, step: 1, about: "they share the prompt's memory" },
  { name: "top_k", label: "Top k", min: -1, step: 1, ours: true, about: "sample among this many tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, ours: true, about: "leave out what is this much less likely than the best" },
  { name: "repetition_penalty", label: "Repetition", min: 0.01, max: 2, step: 0.05, ours: true, about: "above 1 avoids what was said" },
  { name: "frequency_penalty", label: "Frequency", min: -2, max: 2, step: 0.1, about: "per time a token was used" },
  { name: "presence_penalty", label: "Presence", min: -2, max: 2, step: 0.1, about: "once a token was used" },
];

const EXAMPLES = {
  json_schema: JSON.stringify(
    {
      type: "object",
      properties: {
        name: { type: "string", maxLength: 40 },
        country: { type: "string", maxLength: 40 },
        population: { type: "integer" },
        known_for: { type: "array", items: { type: "string", maxLength: 40 }, maxItems: 3 },
      },
      required: ["name", "country", "population", "known_for"],
      additionalProperties: false,
    },
    null,
    2,
  ),
  regex: "(yes|no), because [a-z ]{5,60}\\.",
  ebnf: 'root ::= "The answer is " number "."\nnumber ::= [1-9] [0-9]{0,3}',
};

const TOOLS_EXAMPLE = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city, now.",
        parameters: {
          type: "object",
          properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
          required: ["city"],
        },
      },
    },
  ],
  null,
  2,
);

/** Where neither the user nor the model's authors say anything: calmer than temperature 1, which small models can't take. */
const CALM = { temperature: 0.3, top_p: 0.9 };

const untouched = kept.read("settings", null) === null;
const values = { system: "", stop: "", format: "", sources: {}, toolChoice: "", tools: "", thinking: "", ...kept.read("settings", {}) };
values.sampling = { ...values.sampling };
let changed = () => {};

export class SettingError extends Error {
  constructor(tab, message) {
    super(message);
    this.tab = tab;
  }
}

function save() {
  kept.write("settings", values);
  changed();
}

export const settings = {
  get all() {
    return structuredClone(values);
  },
  get systemMessage() {
    return values.system.trim();
  },
  /** Takes what a file says, as far as it is known. */
  take(given) {
    for (const name of ["system", "stop", "format", "toolChoice", "tools", "thinking"]) {
      if (typeof given?.[name] === "string") values[name] = given[name];
    }
    for (const name of ["sources", "sampling"]) {
      if (given?.[name] && typeof given[name] === "object") values[name] = { ...given[name] };
    }
    save();
    show();
  },
};

/** What is switched on, in a word or two each, for the line under the message box. */
export function active() {
  const found = [];
  if (values.format) found.push({ tab: "json", text: values.format === "json_object" ? "JSON" : values.format.replace("json_", "") });
  if (values.toolChoice) found.push({ tab: "tools", text: "tools" });
  const set = Object.keys(values.sampling).length + (values.stop.trim() ? 1 : 0) + (values.thinking ? 1 : 0);
  if (set) found.push({ tab: "sampling", text: `sampling · ${set}` });
  if (values.system.trim()) found.push({ tab: "sampling", text: "system" });
  return found;
}

/** The fields of a request that come from the settings. Throws `SettingError` where one can't be used. */
export function requestFields() {
  const body = {};
  for (const field of FIELDS) {
    if (field.name in values.sampling && (own || !field.ours)) body[field.name] = values.sampling[field.name];
  }
  const stops = values.stop.split("\n").filter((line) => line.length);
  if (stops.length) body.stop = stops;
  if (values.thinking && own) body.thinking = values.thinking === "on";
  const source = values.sources[values.format] ?? "";
  if (values.format === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("json", source, "schema") } };
  } else if (values.format === "json_object") body.response_format = { type: "json_object" };
  else if (values.format) {
    if (!source.trim()) throw new SettingError("json", "The pattern is empty.");
    body[values.format] = source;
  }
  if (values.toolChoice) {
    const tools = parsed("tools", values.tools, "list of tools");
    if (!Array.isArray(tools) || !tools.length) throw new SettingError("tools", "The tools must be a JSON list with at least one tool.");
    body.tools = tools;
    body.tool_choice = values.toolChoice;
  }
  return body;
}

/** Whether answers are meant to be JSON. */
export const wantsJson = () => values.format.startsWith("json");

function parsed(tab, source, what) {
  try {
    return JSON.parse(source);
  } catch (error) {
    throw new SettingError(tab, `The ${what} is not JSON: ${error.message}`);
  }
}

function samplingField(field) {
  const id = "s-" + field.name;
  const set = (text) => {
    const value = Number(text);
    if (text === "" || !Number.isFinite(value)) delete values.sampling[field.name];
    else values.sampling[field.name] = value;
    save();
  };
  const box = make("input", {
    id, type: "number", min: field.min, max: field.max, step: field.step, placeholder: "default", inputmode: "decimal",
    "aria-describedby": id + "-about",
    oninput: () => {
      set(box.value);
      if (slider && box.value !== "") slider.value = box.value;
    },
  });
  const slider = field.max !== undefined && field.name !== "n"
    ? make("input", {
        type: "range", min: field.min, max: field.max, step: field.step, "aria-label": field.label, tabindex: "-1",
        oninput: () => {
          box.value = slider.value;
          set(slider.value);
        },
      })
    : null;
  field.show = () => {
    const value = values.sampling[field.name];
    box.value = value ?? "";
    if (slider) slider.value = value ?? field.preset ?? (field.name === "temperature" || field.name === "top_p" ? 1 : 0);
  };
  return make("div", { class: "setting" }, make("label", { for: id }, field.label), box,
    slider ?? make("span", { class: "no-slider" }), make("small", { id: id + "-about" }, field.about));
}

function thinkingField() {
  const pick = make("select", { id: "thinking", onchange: () => {
    values.thinking = pick.value;
    save();
  } }, make("option", { value: "" }, "default"), make("option", { value: "on" }, "on"), make("option", { value: "off" }, "off"));
  return make("div", { class: "setting" }, make("label", { for: "thinking" }, "Thinking"), pick,
    make("span", { class: "no-slider" }), make("small", {}, "where the model's template has a switch"));
}

/** Tells the fields which values the server uses if none are set. */
export function presets(recommended) {
  if (untouched && !Object.keys(values.sampling).length && !Object.keys(recommended ?? {}).length) {
    values.sampling = { ...CALM };
    show();
    changed();
  }
  for (const field of FIELDS) {
    if (recommended?.[field.name] === undefined) continue;
    field.preset = recommended[field.name];
    $("s-" + field.name).placeholder = String(field.preset);
    field.show();
  }
}

function show() {
  $("system").value = values.system;
  $("stop-strings").value = values.stop;
  $("format").value = values.format;
  $("tool-choice").value = values.toolChoice;
  $("tools").value = values.tools;
  if (own) $("thinking").value = values.thinking;
  FIELDS.forEach((field) => field.show?.());
  showFormat();
  checkTools();
}

function showFormat() {
  const needsSource = values.format !== "" && values.format !== "json_object";
  $("format-source").hidden = $("format-label").hidden = !needsSource;
  $("format-example").hidden = !needsSource;
  $("format-label").textContent = { json_schema: "Schema", regex: "Regular expression", ebnf: "Grammar" }[values.format] ?? "Pattern";
  $("format-source").value = values.sources[values.format] ?? "";
  check("format-check", values.format === "json_schema", values.sources.json_schema ?? "");
}

const checkTools = () => check("tools-check", values.toolChoice !== "", values.tools);

function check(id, wanted, source) {
  const node = $(id);
  node.className = "check";
  node.textContent = "";
  if (!wanted) return;
  try {
    JSON.parse(source);
    node.textContent = "Valid JSON";
    node.classList.add("good");
  } catch (error) {
    node.textContent = source.trim() ? error.message : "Nothing there yet";
    node.classList.add("bad");
  }
}

/** Fills the panes and listens. `onChange` is called after every change. */
export function wireSettings(onChange) {
  $("sampling").append(...FIELDS.filter((field) => own || !field.ours).map(samplingField));
  if (own) $("sampling").append(thinkingField());
  const bind = (id, event, apply) =>
    $(id).addEventListener(event, () => {
      apply($(id).value);
      save();
    });
  bind("system", "input", (value) => (values.system = value));
  bind("stop-strings", "input", (value) => (values.stop = value));
  bind("format", "change", (value) => {
    values.format = value;
    if (EXAMPLES[value] && !values.sources[value]) values.sources[value] = EXAMPLES[value];
    showFormat();
  });
  bind("format-source", "input", (value) => {
    values.sources[values.format] = value;
    check("format-check", values.format === "json_schema", value);
  });
  bind("tool-choice", "change", (value) => {
    values.toolChoice = value;
    if (value && !values.tools.trim()) $("tools").value = values.tools = TOOLS_EXAMPLE;
    checkTools();
  });
  bind("tools", "input", (value) => {
    values.tools = value;
    checkTools();
  });
  $("format-example").addEventListener("click", () => {
    values.sources[values.format] = EXAMPLES[values.format];
    save();
    showFormat();
  });
  $("tools-example").addEventListener("click", () => {
    $("tools").value = values.tools = TOOLS_EXAMPLE;
    save();
    checkTools();
  });
  $("reset-sampling").addEventListener("click", () => {
    Object.assign(values, { sampling: {}, stop: "", thinking: "" });
    save();
    show();
  });
  changed = onChange;
  show();
}
