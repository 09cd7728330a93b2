// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** A size with three digits at most, like `1.5 GiB`. */
export function bytes(count: number): string {
  let [value, unit] = [count, 0];
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${digits(value, unit === 0)} ${UNITS[unit]}`;
}

function digits(value: number, whole: boolean): string {
  return value >= 10 || whole || Number.isInteger(value) ? Math.round(value).toString() : value.toFixed(1);
}

/** A duration, like `12.5 ms`, `4.1 s` or `3 min`. */
export function duration(ms: number): string {
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** How long ago a time was, like `5 min`. */
export const age = (time: number): string => duration(Math.max(1000, Date.now() - time));

/** A time of day with its date, in the zone of the reader. */
export const time = (ms: number): string =>
  new Date(ms).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const short = (id: string): string => id.slice(0, 12);
export const count = (number: number): string => number.toLocaleString();
export const plural = (number: number, noun: string): string =>
  `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const percent = (share: number): string => `${Math.round(100 * share)} %`;
