// Parts of the page that come in files of their own when they are first shown.
import { useEffect, useRef, useState } from "preact/hooks";
import { openSocket } from "./api";
import type { Written } from "./dirty_trace";
import { bytes, count, duration } from "./format";
import { Table } from "./parts";
import type { RoundInfo } from "./schema";
import type { Rates } from "./usage";

type ConsoleModule = typeof import("./console");
type DisplayModule = typeof import("./display");
type ChartModule = typeof import("./chart");
type Drawn<Point> = import("./chart").Drawn<Point>;

// The build leaves these imports as they are, so they name files of the daemon.
const consoleModule = (): Promise<ConsoleModule> => import(/* @vite-ignore */ "/console.js" as string);
const displayModule = (): Promise<DisplayModule> => import("/display.js" as string);
const chartModule = (): Promise<ChartModule> => import("/chart.js" as string);

/** What a file of its own shows over a socket, in a place of the page. */
interface Shown {
  focus(): void;
  close(): void;
}

/**
 * Opens what a socket shows, and again when the user asks for it. Returns the place, what is open, and why it
 * has ended.
 */
function useShown<Open extends Shown>(
  what: string,
  name: string,
  open: (place: HTMLElement, ended: (opened: boolean) => void) => Promise<Open>,
) {
  const place = useRef<HTMLDivElement>(null);
  const shown = useRef<Open | null>(null);
  const [problem, setProblem] = useState<string>();
  const [turn, again] = useState(0);
  useEffect(() => {
    let live = true;
    setProblem(undefined);
    const ended = (opened: boolean) =>
      live &&
      setProblem(
        opened
          ? `The ${what} has ended: the machine stopped, or the token may not use it any more.`
          : `The ${what} cannot be opened.`,
      );
    if (place.current)
      void open(place.current, ended).then((one) => {
        if (!live) return one.close();
        shown.current = one;
        one.focus();
      });
    return () => {
      live = false;
      shown.current?.close();
      shown.current = null;
    };
  }, [name, turn]);
  const notice = problem && (
    <p class="notice" role="status">
      {problem}{" "}
      <button type="button" onClick={() => again(turn + 1)}>
        Connect again
      </button>
    </p>
  );
  return { place, shown, notice };
}

/** The serial console of a machine, typed into. */
export function Console({ name }: { name: string }) {
  const { place, notice } = useShown("console", name, async (place, ended) =>
    (await consoleModule()).openConsole(place, openSocket("console", name), ended),
  );
  return (
    <>
      {notice}
      <div class="serial" role="region" aria-label={`Serial console of ${name}`}>
        <div ref={place} />
      </div>
      <p class="hint">
        Tab and Ctrl-C go to the guest. To leave the terminal with the keyboard, use Ctrl-Shift-L.
      </p>
    </>
  );
}

/** The screen of a machine, with its keyboard and pointer. */
export function Display({ name }: { name: string }) {
  const { place, shown, notice } = useShown("screen", name, async (place, ended) =>
    (await displayModule()).openDisplay(place, openSocket("display", name), ended),
  );
  return (
    <>
      {notice}
      <div class="actions">
        <button type="button" onClick={() => shown.current?.sendCtrlAltDel()}>
          Send Ctrl-Alt-Delete
        </button>
        <button type="button" onClick={() => void place.current?.requestFullscreen()}>
          Full screen
        </button>
      </div>
      <div class="screen" role="region" aria-label={`Screen of ${name}`} ref={place} />
      <p class="hint">
        All keys go to the guest while its screen has the keyboard. To leave it with the keyboard, use
        Ctrl-Shift-L. All who look see the same screen.
      </p>
    </>
  );
}

/** A chart that goes on while its points do. */
function Chart<Point>({
  draw,
  points,
  label,
}: {
  draw: (module: ChartModule, place: HTMLElement, points: Point[]) => Drawn<Point>;
  points: Point[];
  label: string;
}) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<Drawn<Point> | null>(null);
  const [ready, setReady] = useState(false);
  useEffect(() => {
    let live = true;
    void chartModule().then((module) => {
      if (!live || !place.current) return;
      chart.current = draw(module, place.current, points);
      setReady(true);
    });
    return () => {
      live = false;
      chart.current?.close();
    };
  }, []);
  useEffect(() => {
    if (!chart.current || !place.current) return;
    chart.current.show(points);
    place.current.dataset.drawn = String(points.length);
  }, [points, ready]);
  return <div class="chart" ref={place} role="img" aria-label={label} />;
}

/** What a machine used in the last minutes; the text above has the newest figures. */
export function UsageChart({ rates }: { rates: Rates[] }) {
  return (
    <Chart
      draw={(module, place, points) => module.drawUsage(place, points)}
      points={rates}
      label="Chart of what the machine used; the figures above are the newest of it"
    />
  );
}

/** What a machine writes, while it is sampled and after. */
export function WrittenChart({ written }: { written: Written[] }) {
  return (
    <Chart
      draw={(module, place, points) => module.drawWritten(place, points)}
      points={written}
      label="Chart of what the machine writes; the figures above sum it up"
    />
  );
}

/** Rounds as a chart, and as a table for those who do not see it. */
export function Rounds({ rounds }: { rounds: RoundInfo[] }) {
  return (
    <>
      <Chart
        draw={(module, place, points) => module.drawRounds(place, points)}
        points={rounds}
        label="Chart of the rounds; the table below has its figures"
      />
      <Table
        label="Rounds"
        rows={rounds.map((round, index) => ({ ...round, number: index + 1 }))}
        rowKey={(round) => String(round.number)}
        empty="No round has ended yet."
        columns={[
          { name: "Round", kind: "number", cell: (round) => round.number },
          { name: "Took", kind: "number", cell: (round) => duration(round.ms) },
          { name: "Pages", kind: "number", cell: (round) => count(round.pages) },
          { name: "Sent", kind: "number", cell: (round) => bytes(round.bytes) },
          {
            name: "Rate",
            kind: "number",
            minor: true,
            cell: (round) => `${bytes((1000 * round.bytes) / Math.max(round.ms, 0.1))}/s`,
          },
          { name: "Skipped", kind: "number", minor: true, cell: (round) => count(round.skipped ?? 0) },
          { name: "Left", kind: "number", cell: (round) => count(round.left ?? 0) },
          {
            name: "Predicted downtime",
            kind: "number",
            cell: (round) => (round.downtime_ms ? duration(round.downtime_ms) : "–"),
          },
        ]}
      />
    </>
  );
}
