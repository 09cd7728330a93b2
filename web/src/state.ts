// What the pages share: data that is asked for again and again, operations that run, and messages.
import { useEffect, useState } from "preact/hooks";
import { call, Failure, shownHost, watch } from "./api";
import type { Call, Operation } from "./schema";
import { Store } from "./store";

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

/** Whether the events of the host come in, so that nothing has to be asked for just in case. */
export const following = new Store(false);
/** What others are asked for, of which the events of this host say nothing. */
const ELSEWHERE: Call[] = ["GET /v1/hosts", "GET /v1/sessions", "GET /v1/pools"];
/** Time in which several changes count as one. */
const TOGETHER = 50;
/** Interval of questions while events come in, for what has no event. */
const RARELY = 30_000;
let telling = 0;

/** Lets all lists be asked for at once. */
export function changed(): void {
  telling ||= window.setTimeout(() => {
    telling = 0;
    changes.set(changes.get() + 1);
  }, TOGETHER);
}

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
  // Another host has other operations with the same numbers.
  const host = shownHost();
  const show = (operation: Operation) =>
    watched.set([...watched.get().filter((one) => one.operation.id !== operation.id), { operation, label }]);
  show(first);
  let last = first;
  try {
    for await (const operation of watch(first.id, new AbortController().signal)) {
      if (shownHost() !== host) return;
      show((last = operation));
    }
  } catch (error) {
    sayFailure(label, error);
  }
  watched.set(watched.get().filter((one) => one.operation.id !== first.id));
  if (last.state === "succeeded") say("good", `${label}: done`);
  if (last.state === "failed") sayFailure(label, new Failure(0, last.error));
  if (last.state === "cancelled") say("good", `${label}: cancelled, ${last.left}`);
  changed();
}

/** Forgets what is of a host that is no longer shown. */
export function forget(): void {
  watched.set([]);
  messages.set([]);
  following.set(false);
}

/** What a page asked for: the newest answer, and why there is no newer one. */
export interface Polled<T> {
  data: T | undefined;
  failure: Failure | undefined;
}

/**
 * Asks for the same thing while the page is seen: when something has happened on the host or was changed
 * here, and at intervals while the answer `moves`, which no event tells, or while no events come in. What is
 * `ELSEWHERE` is asked for at intervals only.
 */
export function usePoll<T>(
  name: Call,
  parameters: string[] = [],
  every = 2000,
  moves: (data: T) => boolean = () => false,
): Polled<T> {
  const [polled, show] = useState<Polled<T>>({ data: undefined, failure: undefined });
  const key = parameters.join("/");
  useEffect(() => {
    const elsewhere = ELSEWHERE.includes(name);
    let [live, timer, turn, moving] = [true, 0, 0, false];
    const ask = async () => {
      clearTimeout(timer);
      // Only the newest question goes on asking, or each change would add one that does.
      const mine = ++turn;
      if (!document.hidden) {
        try {
          const data = await call<T>(name, parameters);
          moving = moves(data);
          if (live && mine === turn) show({ data, failure: undefined });
        } catch (error) {
          if (live && mine === turn && error instanceof Failure)
            show((old) => ({ data: old.data, failure: error }));
        }
      }
      const wait = following.get() && !moving && !elsewhere ? Math.max(every, RARELY) : every;
      if (live && mine === turn) timer = window.setTimeout(ask, wait);
    };
    show({ data: undefined, failure: undefined });
    void ask();
    const stop = elsewhere ? () => {} : changes.listen(ask);
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
