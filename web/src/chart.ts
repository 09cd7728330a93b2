// Charts: rounds of a capture or migration, and what a machine uses. Built into a file of its own, which comes
// when it is needed.
import uPlot from "uplot";
import type { Written } from "./dirty_trace";
import { bytes } from "./format";
import type { Rates } from "./usage";

export interface Round {
  ms: number;
  bytes: number;
  left?: number;
  downtime_ms?: number | null;
}

/** A chart that stands in its place. */
export interface Drawn<Point> {
  show(points: Point[]): void;
  close(): void;
}

const PAGE = 4096;
const HEIGHT = 250;
/** Less is drawn as this: a logarithm has no zero. */
const LEAST = 1024;

/**
 * Draws what each round sent and left, and the downtime that it predicted. Rounds stand side by side, since the
 * first takes most of the time, and bytes are on a logarithm, since each sends a part of the one before.
 */
export const drawRounds = (place: HTMLElement, rounds: Round[]): Drawn<Round> =>
  draw(place, roundOptions(place), rounds, points);

/** Draws processor time, network and disks over the time of day. */
export const drawUsage = (place: HTMLElement, rates: Rates[]): Drawn<Rates> =>
  draw(place, usageOptions(place), rates, (all) => [
    all.map((one) => one.at),
    all.map((one) => 100 * one.cpu),
    all.map((one) => one.received + one.sent),
    all.map((one) => one.read + one.written),
  ]);

/** Draws what a machine writes a second, and its working set, over the seconds of a trace. */
export const drawWritten = (place: HTMLElement, written: Written[]): Drawn<Written> =>
  draw(place, writtenOptions(place), written, (all) => [
    all.map((one) => one.at),
    all.map((one) => one.rate * PAGE),
    all.map((one) => one.set * PAGE),
  ]);

function draw<Point>(
  place: HTMLElement,
  options: uPlot.Options,
  first: Point[],
  data: (points: Point[]) => uPlot.AlignedData,
): Drawn<Point> {
  const plot = new uPlot(options, data(first), place);
  const resized = new ResizeObserver(() => plot.setSize({ width: width(place), height: HEIGHT }));
  resized.observe(place);
  return {
    show: (next) => plot.setData(data(next)),
    close: () => {
      resized.disconnect();
      plot.destroy();
    },
  };
}

const width = (place: HTMLElement): number => Math.max(place.clientWidth - 8, 200);

/** Colours of the page, and what all axes have. */
function style(place: HTMLElement) {
  const colour = (name: string) => getComputedStyle(place).getPropertyValue(name).trim();
  const line = { stroke: colour("--line"), width: 1 };
  const axis = {
    stroke: colour("--muted"),
    grid: line,
    ticks: line,
    labelSize: 20,
    font: "12px system-ui",
    labelFont: "12px system-ui",
  };
  return { colour, line, axis };
}

const timeOfDay = (seconds: number): string => new Date(1000 * seconds).toLocaleTimeString();

function usageOptions(place: HTMLElement): uPlot.Options {
  const { colour, axis } = style(place);
  const rate = (_: uPlot, value: number | null) => (value === null ? "–" : `${bytes(value)}/s`);
  const share = (_: uPlot, value: number | null) => (value === null ? "–" : `${Math.round(value)} %`);
  const curve = (label: string, scale: string, name: string, value: typeof rate): uPlot.Series => ({
    label,
    scale,
    stroke: colour(name),
    width: 1.5,
    points: { show: false },
    value,
  });
  return {
    width: width(place),
    height: HEIGHT,
    scales: {
      cpu: { range: (_, __, max) => [0, Math.max(max, 1) * 1.1] },
      rate: { range: (_, __, max) => [0, Math.max(max, LEAST) * 1.1] },
    },
    series: [
      { label: "Time" },
      curve("CPU", "cpu", "--accent", share),
      curve("Network", "rate", "--warn", rate),
      curve("Disks", "rate", "--bad", rate),
    ],
    axes: [
      { ...axis, size: 36, grid: { show: false }, space: 90, values: (_, all) => all.map(timeOfDay) },
      { ...axis, scale: "cpu", size: 56, values: (_, all) => all.map((one) => `${one} %`) },
      {
        ...axis,
        scale: "rate",
        side: 1,
        size: 80,
        grid: { show: false },
        values: (_, all) => all.map((one) => `${bytes(one)}/s`),
      },
    ],
  };
}

function writtenOptions(place: HTMLElement): uPlot.Options {
  const { colour, axis } = style(place);
  const size = (unit: string) => (_: uPlot, value: number | null) =>
    value === null ? "–" : `${bytes(value)}${unit}`;
  const curve = (label: string, scale: string, name: string, unit: string): uPlot.Series => ({
    label,
    scale,
    stroke: colour(name),
    width: 1.5,
    points: { show: false },
    value: size(unit),
  });
  const range: uPlot.Scale.Range = (_, __, max) => [0, Math.max(max, LEAST) * 1.1];
  return {
    width: width(place),
    height: HEIGHT,
    scales: { x: { time: false }, rate: { range }, set: { range } },
    series: [
      { label: "Second", value: (_, value) => (value === null ? "–" : value.toFixed(1)) },
      curve("Written", "rate", "--warn", "/s"),
      curve("Working set", "set", "--accent", ""),
    ],
    axes: [
      { ...axis, label: "seconds", size: 36, grid: { show: false } },
      { ...axis, scale: "rate", size: 80, values: (_, all) => all.map((one) => `${bytes(one)}/s`) },
      {
        ...axis,
        scale: "set",
        side: 1,
        size: 74,
        grid: { show: false },
        values: (_, all) => all.map((one) => bytes(one)),
      },
    ],
  };
}

function roundOptions(place: HTMLElement): uPlot.Options {
  const { colour, line, axis } = style(place);
  // Every power of two has a place on the axis; every fifth gets a line and a name.
  const fifth: uPlot.Axis.Filter = (_, all) => all.map((one) => (Math.log2(one) % 5 === 0 ? one : null));
  const size = (_: uPlot, value: number | null) => (value === null ? "–" : bytes(value));
  const time = (_: uPlot, value: number | null) =>
    value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
  const bar = uPlot.paths.bars!({ size: [0.6, 60] });
  return {
    width: width(place),
    height: HEIGHT,
    scales: {
      x: { time: false, range: (_, __, max) => [0.4, Math.max(max, 1) + 0.6] },
      size: { distr: 3, log: 2, range: (_, __, max) => [LEAST, Math.max(max, LEAST * LEAST) * 2] },
      ms: { range: (_, __, max) => [0, Math.max(max, 1) * 1.1] },
    },
    series: [
      { label: "Round", value: (_, value) => String(value ?? "–") },
      {
        label: "Sent",
        scale: "size",
        stroke: colour("--accent"),
        fill: colour("--accent-soft"),
        width: 1.5,
        paths: bar,
        points: { show: false },
        value: size,
      },
      {
        label: "Left",
        scale: "size",
        stroke: colour("--warn"),
        width: 1.5,
        points: { size: 6 },
        value: size,
      },
      {
        label: "Predicted downtime",
        scale: "ms",
        stroke: colour("--bad"),
        width: 1.5,
        points: { size: 6 },
        value: time,
      },
    ],
    axes: [
      { ...axis, label: "round", size: 36, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100] },
      {
        ...axis,
        scale: "size",
        size: 74,
        filter: fifth,
        grid: { ...line, filter: fifth },
        ticks: { ...line, filter: fifth },
        values: (_, all) => all.map((one) => (one === null ? "" : bytes(one))),
      },
      { ...axis, scale: "ms", side: 1, label: "ms", size: 56, grid: { show: false } },
    ],
  };
}

function points(rounds: Round[]): uPlot.AlignedData {
  return [
    rounds.map((_, index) => index + 1),
    rounds.map((round) => Math.max(round.bytes, LEAST)),
    rounds.map((round) => Math.max((round.left ?? 0) * PAGE, LEAST)),
    rounds.map((round) => round.downtime_ms ?? null),
  ];
}
