// What happens on the host, as it happens: one stream of events, by which every list knows when to ask again.
import { events, Failure, may } from "./api";
import type { HostEvent } from "./schema";
import { changed, following } from "./state";
import { Store } from "./store";

/** Events that are kept for views of the past. */
const KEPT = 500;
/** Pause before the stream is opened again, at first and at most. */
const [SOON, LATE] = [500, 15_000];

/** Newest events, oldest first. */
export const heard = new Store<HostEvent[]>([]);

/** Follows the events of the host while the page is seen; what ends that. */
export function listen(): () => void {
  if (!may("GET /v1/events")) return () => {};
  const ended = new AbortController();
  void listenUntil(ended.signal);
  return () => ended.abort();
}

async function listenUntil(ended: AbortSignal): Promise<void> {
  let pause = SOON;
  while (!ended.aborted) {
    await seen(ended);
    const turn = new AbortController();
    const stop = () => turn.abort();
    const hide = () => document.hidden && stop();
    ended.addEventListener("abort", stop);
    document.addEventListener("visibilitychange", hide);
    try {
      const last = heard.get().at(-1)?.number;
      for await (const news of events(last, turn.signal)) {
        pause = SOON;
        following.set(true);
        if (news.length > 0) note(news);
      }
    } catch (error) {
      // The login page is shown already.
      if (error instanceof Failure && error.status === 401) return;
    }
    following.set(false);
    ended.removeEventListener("abort", stop);
    document.removeEventListener("visibilitychange", hide);
    if (ended.aborted) return;
    // What happened in between is in none of the lists.
    changed();
    await new Promise((go) => setTimeout(go, pause));
    pause = Math.min(LATE, 2 * pause);
  }
}

function note(news: HostEvent[]): void {
  heard.set([...heard.get(), ...news].slice(-KEPT));
  changed();
}

/** Waits until the page is seen. */
function seen(ended: AbortSignal): Promise<void> {
  if (!document.hidden || ended.aborted) return Promise.resolve();
  return new Promise((go) => {
    const done = () => {
      document.removeEventListener("visibilitychange", done);
      ended.removeEventListener("abort", done);
      go();
    };
    document.addEventListener("visibilitychange", done);
    ended.addEventListener("abort", done);
  });
}
