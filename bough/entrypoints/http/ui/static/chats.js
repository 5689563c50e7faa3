// Conversations that the browser keeps: a list that can be searched, with names to change, and a delete that can be undone.

import { $, kept, make, random, toast } from "./dom.js";

const OPEN = "bough.chat";

/** The browser's database; where it has none, memory. A chat: {id, title, isNamed, updated, messages, system}. */
class Store {
  constructor() {
    this.chats = new Map();
    this.database = null;
  }

  async open() {
    try {
      this.database = await new Promise((done, failed) => {
        const opening = indexedDB.open("bough", 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore("chats", { keyPath: "id" });
        opening.onsuccess = () => done(opening.result);
        opening.onerror = () => failed(opening.error);
        opening.onblocked = () => failed(new Error("it is open elsewhere"));
      });
      await this.read();
    } catch {
      this.database = null;
    }
  }

  /** Brings in what other tabs have written. */
  async read() {
    if (!this.database) return;
    const all = await this.ask("readonly", (chats) => chats.getAll());
    this.chats = new Map(all.map((chat) => [chat.id, chat]));
  }

  put(chat) {
    this.chats.set(chat.id, chat);
    return this.ask("readwrite", (chats) => chats.put(structuredClone(chat)));
  }

  remove(id) {
    this.chats.delete(id);
    return this.ask("readwrite", (chats) => chats.delete(id));
  }

  ask(mode, act) {
    if (!this.database) return Promise.resolve();
    return new Promise((done, failed) => {
      const request = act(this.database.transaction("chats", mode).objectStore("chats"));
      request.onsuccess = () => done(request.result);
      request.onerror = () => failed(request.error);
    }).catch(() => toast("This browser has no room for more conversations"));
  }
}

function titleOf(messages) {
  const asked = messages.find((message) => message.role === "user")?.text.trim().split("\n")[0] ?? "";
  return asked.length > 60 ? asked.slice(0, 59) + "…" : asked || "New chat";
}

const sameText = (one, other) => essence(one) === essence(other);
const essence = (messages) => JSON.stringify(messages, (name, value) => (["json", "finish", "stats"].includes(name) ? undefined : value));

/** Text in which a search looks: the title, and what everybody said. */
function contents(chat) {
  const said = chat.messages.map((message) => message.text ?? (message.variants ?? []).map((each) => each.text).join("\n"));
  return [chat.title, ...said].join("\n").toLowerCase();
}

export class Chats {
  /** `show(chat)` puts a chat on the page; null: an empty one. */
  constructor(show) {
    this.store = new Store();
    this.show = show;
    this.current = null;
    this.editing = "";
    $("chat-search").addEventListener("input", () => this.draw());
    document.addEventListener("visibilitychange", async () => {
      if (document.hidden) return;
      await this.store.read();
      this.draw();
    });
  }

  /** Opens what this tab showed before it was loaded again. */
  async begin() {
    await this.store.open();
    let id = "";
    try {
      id = sessionStorage.getItem(OPEN) ?? "";
    } catch {
      // the list still has it
    }
    const chat = this.store.chats.get(id);
    if (chat) this.open(chat.id);
    this.draw();
  }

  open(id) {
    this.remember(this.store.chats.get(id) ?? null);
    this.show(this.current);
    this.draw();
  }

  /** The next message begins a new chat. */
  leave() {
    this.remember(null);
    this.draw();
  }

  remember(chat) {
    this.current = chat;
    try {
      if (chat) sessionStorage.setItem(OPEN, chat.id);
      else sessionStorage.removeItem(OPEN);
    } catch {
      // it can be opened from the list
    }
  }

  /** Keeps the conversation on the page as it is now. */
  save(messages, system) {
    if (!messages.length) return;
    if (!this.current) this.remember({ id: random(), title: "", isNamed: false, updated: 0, messages: [], system: "" });
    const chat = this.current;
    if (sameText(chat.messages, messages) && chat.system === system) return;
    Object.assign(chat, { messages: structuredClone(messages), system, updated: Date.now() });
    if (!chat.isNamed) chat.title = titleOf(messages);
    this.store.put(chat);
    this.draw();
  }

  rename(chat, title) {
    this.editing = "";
    if (title.trim()) {
      Object.assign(chat, { title: title.trim().slice(0, 200), isNamed: true });
      this.store.put(chat);
    }
    this.draw();
  }

  delete(chat) {
    this.store.remove(chat.id);
    const wasOpen = this.current?.id === chat.id;
    if (wasOpen) {
      this.remember(null);
      this.show(null);
    }
    this.draw();
    toast(`Deleted “${chat.title}”`, {
      label: "Undo",
      run: () => {
        this.store.put(chat);
        if (wasOpen) this.open(chat.id);
        else this.draw();
      },
    });
  }

  // -- the list ---------------------------------------------------------------------------------

  draw() {
    const wanted = $("chat-search").value.trim().toLowerCase();
    const all = [...this.store.chats.values()].sort((a, b) => b.updated - a.updated);
    const found = wanted ? all.filter((chat) => contents(chat).includes(wanted)) : all;
    $("chat-list").replaceChildren(...found.map((chat) => this.entry(chat)));
    $("chat-none").hidden = found.length > 0;
    $("chat-none").textContent = all.length ? "No conversation has these words." : "Conversations are kept here, in this browser.";
  }

  entry(chat) {
    const isOpen = this.current?.id === chat.id;
    if (this.editing === chat.id) return make("li", {}, this.nameBox(chat));
    const day = new Date(chat.updated).toLocaleDateString(undefined, { day: "numeric", month: "short" });
    const edit = () => {
      this.editing = chat.id;
      this.draw();
      $("chat-list").querySelector("input")?.select();
    };
    return make("li", { class: isOpen ? "open" : undefined },
      make("button", { type: "button", class: "chat-title", "aria-current": isOpen ? "true" : undefined, onclick: () => this.open(chat.id), title: chat.title },
        make("span", {}, chat.title), make("small", {}, day)),
      make("button", { type: "button", class: "quiet small", "aria-label": `Rename ${chat.title}`, title: "Rename", onclick: edit }, "✎"),
      make("button", { type: "button", class: "quiet small", "aria-label": `Delete ${chat.title}`, title: "Delete", onclick: () => this.delete(chat) }, "✕"));
  }

  nameBox(chat) {
    const box = make("input", { type: "text", "aria-label": "Name of the conversation", maxlength: "200", value: chat.title });
    box.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) this.rename(chat, box.value);
      if (event.key === "Escape") this.rename(chat, "");
    });
    box.addEventListener("blur", () => this.editing === chat.id && this.rename(chat, box.value));
    return box;
  }
}

/** Whether the list is in sight: as the user left it; at first, where there is room. */
export function showChats(open) {
  document.body.classList.toggle("chats-closed", !open);
  $("toggle-chats").setAttribute("aria-expanded", String(open));
}

export const chatsOpen = () => !document.body.classList.contains("chats-closed");
export const chatsWanted = () => kept.read("chats", innerWidth >= 1200);
