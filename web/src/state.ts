// What the pages share: data that is asked for again and again, operations that run, and messages.
import { useEffect, useState } from "preact/hooks";
import { call, Failure, watch } from "./api";
import type { Call, Operation } from "./schema";

/** A value that views show, and that tells them when it changes. */
export class Store<T> {
  private readonly told = new Set<(value: T) => void>();
  constructor(private value: T) {}
  get(): T {
    return this.value;
  }
  set(value: T): void {
    this.value = value;
    this.told.forEach((tell) => tell(value));
  }
  listen(tell: (value: T) => void): () => void {
    this.told.add(tell);
    return () => void this.told.delete(tell);
  }
  use(): T {
    const [value, show] = useState(this.value);
    useEffect(() => {
      show(this.value);
      return this.listen(show);
    }, []);
    return value;
  }
}

/** An operation that this page started. */
export interface Watched {
  operation: Operation;
  label: string;
}

/** A line for the user, until it is closed or has been there for a while. */
export interface Message {
  id: number;
  kind: "good" | "bad";
  text: string;
  hint?: string | null | undefined;
}

export const watched = new Store<Watched[]>([]);
export const messages = new Store<Message[]>([]);
/** Grows when something was changed, so that lists are asked for at once. */
const changes = new Store(0);
let nextMessage = 1;

export const changed = (): void => changes.set(changes.get() + 1);

export function say(kind: Message["kind"], text: string, hint?: string | null): void {
  const id = nextMessage++;
  messages.set([...messages.get().slice(-3), { id, kind, text, hint }]);
  if (kind === "good") setTimeout(() => close(id), 6000);
}

export const close = (id: number): void => messages.set(messages.get().filter((one) => one.id !== id));

export function sayFailure(what: string, error: unknown): void {
  if (error instanceof Failure) {
    const causes = error.api.causes?.length ? `: ${error.api.causes.join(": ")}` : "";
    say("bad", `${what}: ${error.message}${causes}`, error.api.hint);
  } else {
    say("bad", `${what}: ${String(error)}`);
  }
}

/** Makes a call that changes something; says what failed, and follows the operation if one was started. */
export async function act<T>(
  label: string,
  name: Call,
  parameters: string[],
  body?: object,
): Promise<T | undefined> {
  try {
    const answer = await call<T>(name, parameters, body);
    const operation = answer as Operation | undefined;
    if (operation && typeof operation === "object" && "progress" in operation) void follow(label, operation);
    changed();
    return answer;
  } catch (error) {
    sayFailure(label, error);
    return undefined;
  }
}

/** Shows an operation at the edge of the page until it has ended. */
async function follow(label: string, first: Operation): Promise<void> {
  const show = (operation: Operation) =>
    watched.set([...watched.get().filter((one) => one.operation.id !== operation.id), { operation, label }]);
  show(first);
  let last = first;
  try {
    for await (const operation of watch(first.id, new AbortController().signal)) show((last = operation));
  } catch (error) {
    sayFailure(label, error);
  }
  watched.set(watched.get().filter((one) => one.operation.id !== first.id));
  if (last.state === "succeeded") say("good", `${label}: done`);
  if (last.state === "failed") sayFailure(label, new Failure(0, last.error));
  if (last.state === "cancelled") say("good", `${label}: cancelled, ${last.left}`);
  changed();
}

/** What a page asked for: the newest answer, and why there is no newer one. */
export interface Polled<T> {
  data: T | undefined;
  failure: Failure | undefined;
}

/** Asks for the same thing while the page is seen, and at once when something was changed here. */
export function usePoll<T>(name: Call, parameters: string[] = [], every = 2000): Polled<T> {
  const [polled, show] = useState<Polled<T>>({ data: undefined, failure: undefined });
  const key = parameters.join("/");
  useEffect(() => {
    let [live, timer, turn] = [true, 0, 0];
    const ask = async () => {
      clearTimeout(timer);
      // Only the newest question goes on asking, or each change would add one that does.
      const mine = ++turn;
      if (!document.hidden) {
        try {
          const data = await call<T>(name, parameters);
          if (live && mine === turn) show({ data, failure: undefined });
        } catch (error) {
          if (live && mine === turn && error instanceof Failure)
            show((old) => ({ data: old.data, failure: error }));
        }
      }
      if (live && mine === turn) timer = window.setTimeout(ask, every);
    };
    show({ data: undefined, failure: undefined });
    void ask();
    const stop = changes.listen(ask);
    document.addEventListener("visibilitychange", ask);
    return () => {
      live = false;
      clearTimeout(timer);
      stop();
      document.removeEventListener("visibilitychange", ask);
    };
  }, [name, key, every]);
  return polled;
}
