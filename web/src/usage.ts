// What machines use, asked again and again while somebody looks, and the rates that follow from it.
import { useEffect } from "preact/hooks";
import { call, may } from "./api";
import type { MachineUsage } from "./schema";
import { Store } from "./store";

/** What a machine used between two readings. */
export interface Rates {
  at: number;
  /** Share of one CPU. */
  cpu: number;
  resident: number;
  /** Bytes a second. */
  received: number;
  sent: number;
  read: number;
  written: number;
}

const EVERY = 2000;
/** Readings that are kept: five minutes of them. */
const KEPT = 150;

const histories = new Store<Map<string, Rates[]>>(new Map());
let before = new Map<string, MachineUsage>();
let [lookers, timer, turn] = [0, 0, 0];

/** None if the processes are others than before, which begin to count anew. */
function ratesOf(old: MachineUsage, now: MachineUsage): Rates | undefined {
  const seconds = (now.at_ms - old.at_ms) / 1000;
  const a_second = (of: (usage: MachineUsage) => number) => (of(now) - of(old)) / seconds;
  const rates = {
    at: now.at_ms / 1000,
    cpu: a_second((usage) => usage.cpu_ms / 1000),
    resident: now.resident,
    received: a_second((usage) => usage.received),
    sent: a_second((usage) => usage.sent),
    read: a_second((usage) => usage.read),
    written: a_second((usage) => usage.written),
  };
  return seconds > 0 && Object.values(rates).every((rate) => rate >= 0) ? rates : undefined;
}

/** Only the newest turn goes on, or each page that is left while an answer is awaited would add one. */
async function look(mine: number): Promise<void> {
  try {
    if (!document.hidden) note(await call<MachineUsage[]>("GET /v1/usage", []));
  } catch {
    // The lists of the page say what does not answer.
  }
  if (mine === turn) timer = window.setTimeout(() => void look(mine), EVERY);
}

function note(all: MachineUsage[]): void {
  const next = new Map<string, Rates[]>();
  for (const usage of all) {
    const old = before.get(usage.name);
    const rates = old && ratesOf(old, usage);
    next.set(
      usage.name,
      [...(histories.get().get(usage.name) ?? []), ...(rates ? [rates] : [])].slice(-KEPT),
    );
  }
  before = new Map(all.map((usage) => [usage.name, usage]));
  histories.set(next);
}

/** Rates of all machines that have processes, oldest first. */
export function useUsage(): Map<string, Rates[]> {
  useEffect(() => {
    if (!may("GET /v1/usage")) return;
    if (lookers++ === 0) void look(++turn);
    return () => {
      if (--lookers > 0) return;
      turn++;
      clearTimeout(timer);
    };
  }, []);
  return histories.use();
}
