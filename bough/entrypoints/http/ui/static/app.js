// Wires the page: what is typed, clicked and dropped, and what the server says in return.

import { credentials, get, native, own, root } from "./api.js";
import { Chats, chatsOpen, chatsWanted, showChats } from "./chats.js";
import { asCode, Conversation } from "./conversation.js";
import { $, copy, download, kept, make, number, plural, toast } from "./dom.js";
import { LiveView } from "./live.js";
import { MessageList } from "./messages.js";
import { active, presets, requestFields, SettingError, settings, wantsJson, wireSettings } from "./settings.js";

const SUGGESTIONS = [
  "Why is the sky blue?",
  "Write a haiku about a tree.",
  "Explain recursion to a child, in three sentences.",
  "Name three rivers of Europe as a list.",
];
const WATCH_MS = 2500;
const CHARACTERS_PER_TOKEN = 4;

const talk = new Conversation();
const narrow = matchMedia("(max-width: 860px)");
let images = [];
let takesImages = !own;
let pinned = true;
let contextLength = 0;

const list = new MessageList($("messages"), {
  edit(message, text) {
    const at = talk.messages.indexOf(message);
    talk.stop();
    talk.messages.splice(at, Infinity, { ...message, text });
    refresh();
    answer();
  },
  regenerate: (message) => !talk.busy && answer(talk.messages.indexOf(message)),
  /** Asks again in the place of an answer that failed. */
  retry(message) {
    if (talk.busy) return;
    const failed = Conversation.answer(message);
    answer(talk.messages.indexOf(message));
    if (!talk.busy) return;
    message.variants.splice(message.variants.indexOf(failed), 1);
    message.at--;
    list.update(message, true);
  },
  remove(message) {
    talk.stop();
    const before = talk.messages;
    talk.messages = before.slice(0, before.indexOf(message));
    refresh();
    const undo = () => {
      talk.messages = before;
      refresh();
    };
    toast("Removed", { label: "Undo", run: undo });
  },
  pick(message, at) {
    message.at = at;
    list.update(message, talk.busy);
    save();
  },
  /** A call can still be answered while nothing but other results follows it. */
  hasResult(message, call) {
    const later = talk.messages.slice(talk.messages.indexOf(message) + 1);
    return later.some((each) => each.role !== "tool" || each.callId === call.id);
  },
  result(message, call, text) {
    talk.messages.push({ role: "tool", callId: call.id, name: call.name, text });
    refresh();
    const calls = Conversation.answer(message).calls;
    if (calls.every((each) => talk.messages.some((given) => given.role === "tool" && given.callId === each.id))) answer();
  },
});

// -- the conversation -----------------------------------------------------------------------------

let drawing = 0;
talk.onChange = (message, whole) => {
  if (whole) {
    refresh();
    return;
  }
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    list.update(message, talk.busy);
    follow();
  });
};
talk.onKeyNeeded = () => {
  openTab("server");
  $("key").focus();
};

function refresh() {
  if (wantsJson()) for (const message of talk.messages) checkJson(message);
  list.show(talk.messages, talk.busy);
  $("welcome").hidden = talk.messages.length > 0;
  $("stop").hidden = !talk.busy;
  $("send").hidden = talk.busy;
  $("log").setAttribute("aria-busy", String(talk.busy));
  follow();
  showContext();
  save();
}

function checkJson(message) {
  for (const variant of message.variants ?? []) {
    if (!variant.finish || variant.json !== undefined || !variant.text) continue;
    try {
      JSON.parse(variant.text);
      variant.json = true;
    } catch {
      variant.json = false;
    }
  }
}

const save = () => chats.save(talk.messages, settings.systemMessage);

const chats = new Chats((chat) => {
  talk.import(JSON.stringify({ messages: chat?.messages ?? [], settings: { system: chat?.system ?? "" } }));
  refresh();
  if (narrow.matches) showChats(false);
});

$("toggle-chats").addEventListener("click", () => {
  showChats(!chatsOpen());
  if (!narrow.matches) kept.write("chats", chatsOpen());
});
$("close-chats").addEventListener("click", () => showChats(false));

/** How much of the model's context the conversation takes: as the server counted last, and a guess for what is typed. */
function showContext() {
  const last = talk.messages.findLast((message) => message.role === "assistant" && Conversation.answer(message).stats?.prompt);
  const stats = last ? Conversation.answer(last).stats : null;
  const later = last ? talk.messages.slice(talk.messages.indexOf(last) + 1) : talk.messages;
  const unread = [...later.map((message) => message.text ?? ""), $("prompt").value, last ? "" : settings.systemMessage].join("");
  const guess = Math.ceil(unread.length / CHARACTERS_PER_TOKEN);
  const used = (stats ? stats.prompt + stats.tokens : 0) + guess;
  const isShown = contextLength > 0 && used > 0;
  $("context").hidden = $("context-text").hidden = !isShown;
  if (!isShown) return;
  const share = Math.min(1, used / contextLength);
  $("context").setAttribute("aria-valuemax", contextLength);
  $("context").setAttribute("aria-valuenow", Math.min(used, contextLength));
  $("context").classList.toggle("full", share > 0.8);
  $("context").firstElementChild.style.width = `${100 * share}%`;
  $("context-text").textContent = `${guess ? "≈ " : ""}${number(used)} of ${number(contextLength)} tokens`;
}

async function answer(at) {
  pinned = true;
  try {
    requestFields();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    toast(error.message);
    openTab(error.tab);
    return;
  }
  poll();
  await talk.generate($("model").value, at);
  $("prompt").focus({ preventScroll: true });
}

function submit() {
  const text = $("prompt").value;
  if (talk.busy || (!text.trim() && !images.length)) return;
  talk.messages.push({ role: "user", text: text.trim(), images });
  images = [];
  $("prompt").value = "";
  showAttachments();
  grow();
  refresh();
  answer();
}

/** Keeps the newest text in sight, unless the reader has scrolled away from it. */
function follow() {
  if (pinned) $("log").scrollTop = $("log").scrollHeight;
}

$("log").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("log");
  pinned = scrollHeight - scrollTop - clientHeight < 60;
});

// -- the message box ------------------------------------------------------------------------------

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
}

$("prompt").addEventListener("input", () => {
  grow();
  showContext();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && $("prompt").value === "" && !talk.busy) {
    const last = talk.messages.findLast((message) => message.role === "user");
    if (last) {
      event.preventDefault();
      list.edit(last);
    }
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", () => talk.stop());

for (const text of SUGGESTIONS) {
  const ask = () => {
    $("prompt").value = text;
    submit();
  };
  $("suggestions").append(make("button", { type: "button", class: "suggestion", onclick: ask }, text));
}

function showChips() {
  const chip = (each) => make("button", { type: "button", class: "chip", onclick: () => openTab(each.tab) }, each.text);
  $("chips").replaceChildren(...active().map(chip));
}

// -- images ---------------------------------------------------------------------------------------

function showAttachments() {
  $("attachments").replaceChildren(...images.map((url, at) => {
    const drop = () => {
      images.splice(at, 1);
      showAttachments();
    };
    return make("span", { class: "attachment" }, make("img", { src: url, alt: `image ${at + 1}` }),
      make("button", { type: "button", class: "quiet icon", "aria-label": `Remove image ${at + 1}`, onclick: drop }, "✕"));
  }));
}

function addImages(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  if (!found.length) return;
  if (!takesImages) {
    toast("This model reads text only");
    return;
  }
  for (const file of found) {
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      images.push(reader.result);
      showAttachments();
    });
    reader.readAsDataURL(file);
  }
}

$("attach").addEventListener("click", () => $("image-file").click());
$("image-file").addEventListener("change", (event) => {
  addImages(event.target.files);
  event.target.value = "";
});
$("prompt").addEventListener("paste", (event) => addImages(event.clipboardData?.files ?? []));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  const files = [...(event.dataTransfer?.files ?? [])];
  const saved = files.find((file) => file.type === "application/json" || file.name.endsWith(".json"));
  if (saved) open(await saved.text());
  else addImages(files);
});

// -- files ----------------------------------------------------------------------------------------

function open(text) {
  try {
    talk.import(text);
    chats.leave();
    refresh();
    toast(`Opened ${plural(talk.messages.length, "message")}`);
  } catch (error) {
    toast(`That file can't be opened: ${error.message}`);
  }
}

for (const id of ["export", "export-2"]) {
  $(id).addEventListener("click", () => {
    const stamp = new Date().toISOString().slice(0, 16).replace(/[:T]/g, "-");
    download(`bough-${stamp}.json`, talk.export());
  });
}
for (const id of ["import", "import-2"]) $(id).addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) open(await file.text());
});

$("new-chat").addEventListener("click", () => {
  chats.leave();
  talk.clear();
  refresh();
  $("prompt").focus();
});

// -- code -----------------------------------------------------------------------------------------

function showCode() {
  try {
    const typed = $("prompt").value.trim();
    const asked = talk.messages.at(-1)?.role === "assistant" ? talk.messages.slice(0, -1) : talk.messages;
    const messages = typed ? [...talk.messages, { role: "user", text: typed, images }] : asked;
    const shown = messages.length ? messages : [{ role: "user", text: SUGGESTIONS[0], images: [] }];
    $("code-text").textContent = asCode($("code-kind").value, talk.body($("model").value, shown));
    if (!$("code-dialog").open) $("code-dialog").showModal();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    toast(error.message);
    openTab(error.tab);
  }
}

for (const id of ["show-code", "show-code-2"]) $(id).addEventListener("click", showCode);
$("code-kind").addEventListener("change", showCode);
$("copy-code").addEventListener("click", () => copy($("code-text").textContent));
for (const name of ["code", "help"]) {
  const dialog = $(`${name}-dialog`);
  $(`close-${name}`).addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
$("help").addEventListener("click", () => $("help-dialog").showModal());

// -- tabs and the panel ---------------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];

function openTab(name, focus = false) {
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  showPanel(true);
}

function showPanel(open) {
  document.body.classList.toggle("panel-closed", !open);
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  if (!narrow.matches) kept.write("panel", open);
  if (open) poll();
}

const panelOpen = () => !document.body.classList.contains("panel-closed");

tabs.forEach((tab, at) => {
  tab.addEventListener("click", () => openTab(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1 : (at + step + tabs.length) % tabs.length;
    if (!Number.isNaN(next)) {
      event.preventDefault();
      openTab(tabs[next].id.slice(4), true);
    }
  });
});
$("toggle-panel").addEventListener("click", () => showPanel(!panelOpen()));
$("close-panel").addEventListener("click", () => showPanel(false));

// -- theme and keys -------------------------------------------------------------------------------

const THEMES = { system: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function showTheme(name) {
  document.documentElement.dataset.theme = name;
  const [sign, words] = THEMES[name] ?? THEMES.system;
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Theme: ${words}`);
  $("theme").title = `Theme: ${words}`;
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  try {
    localStorage.setItem("bough.theme", next);
  } catch {
    // it lasts as long as the page
  }
  showTheme(next);
});

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
  if (event.key === "Escape" && talk.busy && !document.querySelector("dialog[open]")) talk.stop();
  else if (event.altKey && event.key.toLowerCase() === "n") $("new-chat").click();
  else if (event.altKey && tabs[Number(event.key) - 1]) openTab(tabs[Number(event.key) - 1].id.slice(4), true);
  else if (!typing && event.key === "/") $("prompt").focus();
  else if (!typing && event.key === "?") $("help-dialog").showModal();
  else return;
  event.preventDefault();
});

// -- the server -----------------------------------------------------------------------------------

function health(text, kind) {
  $("health").textContent = text;
  $("health").className = `pill ${kind}`;
}

function keyState(text) {
  $("key-check").textContent = text;
  $("key-check").classList.toggle("bad", text !== "");
}

/** Notices a server that has died or come back, whatever the page shows. */
async function watch() {
  for (;;) {
    await new Promise((resume) => setTimeout(resume, WATCH_MS));
    if (document.hidden || !own) continue;
    try {
      const probe = await fetch(native("readyz"), { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!probe.ok) health("not ready", "bad");
      else if (["unreachable", "not ready"].includes($("health").textContent)) connect();
    } catch {
      health("unreachable", "bad");
    }
  }
}

async function connect() {
  try {
    const { data } = await get(new URL("models", root));
    const before = $("model").value;
    $("model").replaceChildren(...data.map((model) => make("option", { value: model.id }, model.id)));
    if (data.some((model) => model.id === before)) $("model").value = before;
    health("ready", "good");
    keyState("");
    contextLength = data[0]?.max_model_len ?? 0;
    showContext();
    if (own) await describe(data);
    return true;
  } catch (error) {
    if (error.status === 401) {
      const isWrong = credentials.key !== "";
      health(isWrong ? "wrong key" : "key needed", "bad");
      keyState(isWrong ? "The server does not accept this key." : "This server wants a key.");
      openTab("server");
      $("key").focus();
    } else {
      health(error.status ? "not ready" : "unreachable", "bad");
      if (!own) setTimeout(connect, 3000);
    }
    return false;
  }
}

async function describe(models) {
  const info = await get(native("model_info"));
  presets(info.preferred_sampling_params);
  takesImages = info.has_image_understanding === true;
  $("attach").hidden = !takesImages;
  const facts = [
    ["Model", info.served_model_name],
    ["Kind", (info.architectures ?? []).join(", ") || "?"],
    ["Context", plural(models[0]?.max_model_len ?? 0, "token")],
    ["Reasoning", info.reasoning_parser ?? "none"],
    ["Tool calls", info.tool_call_parser ?? "by instruction"],
    ["API", root.href.replace(/\/$/, "")],
  ];
  $("about").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

$("key").value = credentials.key;
$("remember").checked = credentials.remembered;
const useKey = () => {
  credentials.set($("key").value.trim(), $("remember").checked);
  connect().then((good) => good && poll());
};
$("key").addEventListener("change", useKey);
$("remember").addEventListener("change", useKey);
$("go-api").addEventListener("click", () => {
  const wanted = $("api").value.trim();
  location.search = wanted ? `?api=${encodeURIComponent(wanted)}` : "";
});

// -- the live view --------------------------------------------------------------------------------

const live = new LiveView((rid) => [...talk.rids].some((mine) => mine === rid || (rid.endsWith("…") && mine.startsWith(rid.slice(0, -1)))));
let polling = false;

async function poll() {
  if (polling || !own) return;
  polling = true;
  while (panelOpen() && !$("pane-live").hidden && !document.hidden) {
    try {
      live.update(await get(native("ui/state")));
      $("live").classList.remove("stale");
      if ($("health").classList.contains("bad")) connect();
    } catch (error) {
      $("live").classList.add("stale");
      if (error.status === 401) break;
      health(error.status ? "not ready" : "unreachable", "bad");
    }
    await new Promise((resume) => setTimeout(resume, talk.busy ? 400 : 1200));
  }
  polling = false;
}

document.addEventListener("visibilitychange", () => poll());

// -- begin ----------------------------------------------------------------------------------------

if (!own) {
  $("elsewhere").hidden = false;
  $("elsewhere").textContent = `This page talks to ${root.origin}, not to the server it came from.`;
  $("api").value = root.href;
  $("live").hidden = true;
  $("live-off").hidden = false;
  $("live-off").textContent = "The live view shows the server that this page came from. It is off while the page talks to another one.";
  $("attach").hidden = false;
}
showTheme(document.documentElement.dataset.theme);
wireSettings(() => {
  showChips();
  for (const message of talk.messages) for (const variant of message.variants ?? []) delete variant.json;
});
showChips();
showChats(!narrow.matches && chatsWanted());
showPanel(!narrow.matches && kept.read("panel", true));
refresh();
chats.begin();
connect().then((good) => good && poll());
watch();
$("prompt").focus({ preventScroll: true });
