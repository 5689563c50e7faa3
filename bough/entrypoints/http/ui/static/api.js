// The public API, as any client speaks it. Addresses are relative to the page, so a path prefix changes nothing.

import { kept } from "./dom.js";

const here = new URL("../", location.href);
const wanted = new URLSearchParams(location.search).get("api") || "";

/** Whether the page talks to the server that sent it. */
export const own = !wanted;
/** Root of OpenAI's routes, with a slash at its end. */
export const root = own ? new URL("v1/", here) : new URL(wanted.replace(/\/*$/, "/"), here);
/** Routes that only this server has. */
export const native = (path) => new URL(path, here);

// A key belongs to one address: a link that opens the page for another server must not get this one's.
const place = "key:" + root.origin + root.pathname;
let key = kept.read(place, "");

export const credentials = {
  get key() {
    return key;
  },
  get remembered() {
    return kept.read(place, "") !== "";
  },
  set(value, remember) {
    key = value;
    kept.write(place, remember && value ? value : undefined);
  },
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(extra = {}) {
  return key ? { authorization: `Bearer ${key}`, ...extra } : extra;
}

async function failed(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.error ?? body.message ?? message;
  } catch {
    // no JSON: the status line has to do
  }
  return new ApiError(response.status, String(message));
}

export async function get(url) {
  const response = await fetch(url, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await failed(response);
  return response.json();
}

/** POSTs and yields every event of the stream that answers, parsed. Ends at [DONE]; throws an error event. */
export async function* stream(url, body, signal) {
  const response = await fetch(url, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failed(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const parsed = JSON.parse(data);
    if (parsed.error) throw new ApiError(parsed.error.code ?? 0, parsed.error.message ?? String(parsed.error));
    yield parsed;
  }
}

/** The data of server-sent events: lines may end in \n or \r\n, an event may have several data lines. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      let end;
      while ((end = rest.indexOf("\n")) >= 0) {
        const line = rest.slice(0, end).replace(/\r$/, "");
        rest = rest.slice(end + 1);
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) break;
    }
    if (data.length) yield data.join("\n");
  } finally {
    reader.cancel().catch(() => {});
  }
}
