// What a machine writes: its pages, sampled while the user looks, and its working set, which a move has to send
// while the machine stands still.
import { useEffect, useRef, useState } from "preact/hooks";
import { dirtyTrace, Failure } from "../api";
import { TraceReader, WorkingSet, type Written } from "../dirty_trace";
import { bytes, count } from "../format";
import { WrittenChart } from "../lazy";
import { Facts, Section } from "../parts";
import type { MachineInfo } from "../schema";

const PAGE = 4096;
const SAMPLE_MS = 100;
const DURATION_MS = 30_000;
/** Samples that are shown together, so that a trace that comes quickly is not drawn for each. */
const DRAW_MS = 200;

interface Trace {
  written: Written[];
  /** Different pages that were written. */
  total: number;
}

export function Writes({ machine }: { machine: MachineInfo }) {
  const [trace, setTrace] = useState<Trace>();
  const [problem, setProblem] = useState<string>();
  const [running, setRunning] = useState(false);
  const stop = useRef<AbortController>();
  useEffect(() => () => stop.current?.abort(), [machine.name]);

  const sample = async () => {
    const controller = new AbortController();
    stop.current = controller;
    setProblem(undefined);
    setRunning(true);
    try {
      await follow(machine.name, controller.signal, setTrace);
    } catch (error) {
      if (!controller.signal.aborted)
        setProblem(error instanceof Failure ? error.message : "the trace cannot be read");
    }
    setRunning(false);
  };
  const tools = running ? (
    <button type="button" onClick={() => stop.current?.abort()}>
      Stop sampling
    </button>
  ) : (
    <button type="button" class="primary" disabled={!machine.pid} onClick={() => void sample()}>
      Sample for 30 seconds
    </button>
  );
  return (
    <Section title="What the machine writes" tools={tools}>
      {problem && (
        <p class="notice bad" role="alert">
          {problem}
        </p>
      )}
      {trace ? (
        <Sampled trace={trace} />
      ) : (
        <p class="empty">
          {machine.pid
            ? "Nothing has been sampled. Sampling takes no memory from the machine, and little of its time."
            : "A machine can be sampled while it runs."}
        </p>
      )}
      <p class="hint">
        A move copies the working set last, while the machine stands still.{" "}
        <code>whimbrel dirty-rate {machine.name}</code> predicts for how long, for links of your choice.
      </p>
    </Section>
  );
}

/** Shows a trace while it grows. */
async function follow(name: string, signal: AbortSignal, show: (trace: Trace) => void): Promise<void> {
  const [reader, set, written] = [new TraceReader(), new WorkingSet(), [] as Written[]];
  const request = { sample_ms: SAMPLE_MS, duration_ms: DURATION_MS };
  let shown = 0;
  try {
    for await (const piece of dirtyTrace(name, request, signal)) {
      for (const sample of reader.feed(piece)) written.push(set.add(sample));
      if (Date.now() - shown < DRAW_MS) continue;
      shown = Date.now();
      show({ written: [...written], total: set.total });
    }
  } finally {
    show({ written: [...written], total: set.total });
  }
}

function Sampled({ trace: { written, total } }: { trace: Trace }) {
  const seconds = written.at(-1)?.at ?? 0;
  const mean = (of: (one: Written) => number) =>
    written.reduce((sum, one) => sum + of(one), 0) / Math.max(written.length, 1);
  const most = written.reduce((most, one) => Math.max(most, one.set), 0);
  return (
    <>
      <Facts
        facts={[
          ["Sampled", `${seconds.toFixed(1)} s, ${count(written.length)} samples`],
          ["Written", `${bytes(mean((one) => one.rate) * PAGE)}/s`],
          [
            "Working set",
            `${bytes((written.at(-1)?.set ?? 0) * PAGE)} within a second, at most ${bytes(most * PAGE)}`,
          ],
          ["Different pages", `${count(total)} (${bytes(total * PAGE)})`],
        ]}
      />
      <WrittenChart written={written} />
    </>
  );
}
