// The API reference: /openapi.json, drawn. Needs nothing from other hosts.

import { credentials, get, native } from "./api.js";
import { $, make } from "./dom.js";

let schemas = {};

function resolve(schema) {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? { name, ...schemas[name] } : schema ?? {};
}

/** A type in words: "string", "list of Tool", "number or null". */
function words(schema, depth = 0) {
  if (schema === undefined || schema === true) return "anything";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const some = schema.anyOf ?? schema.oneOf;
  if (some) return some.map((each) => words(each, depth + 1)).filter((each) => each !== "null").join(" | ") || "null";
  if (schema.type === "array") return `list of ${words(schema.items, depth + 1)}`;
  if (schema.type === "object") return schema.additionalProperties && depth < 3 ? `object of ${words(schema.additionalProperties, depth + 1)}` : "object";
  return schema.type ?? "anything";
}

function fields(schema) {
  const { properties = {}, required = [] } = resolve(schema);
  const rows = Object.entries(properties).sort(([a], [b]) => required.includes(b) - required.includes(a));
  return make("table", {}, make("tbody", {}, ...rows.map(([name, each]) =>
    make("tr", {}, make("th", { scope: "row" }, make("code", {}, name), required.includes(name) ? make("small", {}, " required") : null),
      make("td", {}, words(each))))));
}

function curl(method, path, body) {
  const key = credentials.key ? ' -H "authorization: Bearer $API_KEY"' : "";
  const send = body ? " -H 'content-type: application/json' -d '{...}'" : "";
  const verb = method === "get" ? "" : `-X ${method.toUpperCase()} `;
  return `curl ${verb}${native(path.slice(1)).href}${key}${send}`;
}

function operation(path, method, described) {
  const body = described.requestBody?.content["application/json"].schema;
  const open = described.security ? "" : "no key needed";
  const summary = make("summary", {}, make("b", { class: `verb ${method}` }, method.toUpperCase()), make("code", {}, path),
    make("span", {}, described.summary ?? ""), open ? make("small", {}, open) : null);
  const node = make("details", { class: "route", "data-find": `${method} ${path} ${described.summary}`.toLowerCase() }, summary);
  node.addEventListener("toggle", () => {
    if (!node.open || node.children.length > 1) return;
    node.append(make("pre", { tabindex: "0" }, curl(method, path, body)));
    if (body) node.append(make("h2", {}, "Body"), fields(body));
  });
  return node;
}

async function show() {
  try {
    const document_ = await get(native("openapi.json"));
    schemas = document_.components?.schemas ?? {};
    $("version").textContent = document_.info.version;
    const all = Object.entries(document_.paths).flatMap(([path, methods]) =>
      Object.entries(methods).filter(([method]) => method !== "head").map(([method, described]) => operation(path, method, described)));
    $("routes").replaceChildren(...all);
    $("trouble").hidden = $("key-form").hidden = true;
  } catch (error) {
    $("trouble").textContent = error.message;
    $("key-form").hidden = error.status !== 401;
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  credentials.set($("key").value.trim(), false);
  show();
});
$("filter").addEventListener("input", () => {
  const wanted = $("filter").value.toLowerCase().split(/\s+/);
  for (const route of $("routes").children) route.hidden = !wanted.every((word) => route.dataset.find.includes(word));
});
show();
