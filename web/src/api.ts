// Calls of the HTTP API with the token of this tab, and which of them its holder may make. On the page of several
// hosts (`whimbrel web`) the calls are those of the host that is shown, and the token is the page's password.
import type { ApiError, Call, CallerInfo, HostEvent, Operation } from "./schema";

/** The token is kept for this tab only, and never in an address: those end up in histories and logs. */
const KEY = "whimbrel-token";

/** Name of the host that is shown, in this tab. */
const SHOWN = "whimbrel-host";
/** Whether this is the page of several hosts: then calls begin with the host. */
export const ofSeveral = document.querySelector('meta[name="hosts"]') !== null;

/** A host of the page, and where the page finds it. */
export interface HostPlace {
  name: string;
  address: string;
}

/** A call that failed, as the daemon describes it. */
export class Failure extends Error {
  constructor(
    readonly status: number,
    readonly api: ApiError,
  ) {
    super(api.message);
  }
}

let caller: CallerInfo | undefined;
let hosts: HostPlace[] = [];
/** Told when the daemon no longer knows the token. */
let onRefused: () => void = () => {};

/** The hosts of the page; none if it is that of one host. */
export const hostPlaces = (): HostPlace[] => hosts;
/** The host that is shown, where there are several. */
export const shownHost = (): string | null => (ofSeveral ? sessionStorage.getItem(SHOWN) : null);
const base = (host: string | null): string => (host === null ? "" : `/hosts/${encodeURIComponent(host)}`);
const authorized = (text: string): RequestInit => ({ headers: { authorization: `Bearer ${text}` } });

export const token = (): string | null => sessionStorage.getItem(KEY);
export const currentCaller = (): CallerInfo | undefined => caller;
export const whenRefused = (told: () => void): void => void (onRefused = told);

/** Whether the holder of the token may make this call at all. */
export const may = (call: Call): boolean => caller?.calls.includes(call) ?? false;

/** Checks a token, or the one of this tab, and keeps it. */
export async function login(given?: string): Promise<CallerInfo> {
  const text = given ?? token() ?? "";
  if (!ofSeveral) return callerAt(null, text);
  const answer = await fetch("/hosts", authorized(text));
  if (!answer.ok) throw await failure(answer);
  hosts = (await answer.json()) as HostPlace[];
  sessionStorage.setItem(KEY, text);
  // The one of before, or else the first that answers.
  const before = shownHost();
  const order = [...hosts].sort((a, b) => Number(b.name === before) - Number(a.name === before));
  let problem: unknown = new Failure(0, { code: "not_found", message: "the page has no hosts" });
  for (const { name } of order) {
    try {
      return await showHost(name);
    } catch (error) {
      if (name === order[0]?.name) problem = error;
    }
  }
  throw problem;
}

/** Shows another host, if it answers. */
export async function showHost(name: string): Promise<CallerInfo> {
  const found = await callerAt(name, token() ?? "");
  sessionStorage.setItem(SHOWN, name);
  return found;
}

async function callerAt(host: string | null, text: string): Promise<CallerInfo> {
  const answer = await fetch(`${base(host)}/v1/caller`, authorized(text));
  if (!answer.ok) throw await failure(answer);
  caller = (await answer.json()) as CallerInfo;
  sessionStorage.setItem(KEY, text);
  return caller;
}

export function logout(): void {
  sessionStorage.removeItem(KEY);
  sessionStorage.removeItem(SHOWN);
  [caller, hosts] = [undefined, []];
}

/** Fills in the parameters of a path, at a host if the page has several. */
function path(call: Call, parameters: string[], host = shownHost()): [string, string] {
  const [method = "", template = ""] = call.split(" ");
  let next = 0;
  return [
    method,
    base(host) + template.replace(/\{[^}]*\}/g, () => encodeURIComponent(parameters[next++] ?? "")),
  ];
}

async function send(
  call: Call,
  parameters: string[],
  body?: object,
  signal?: AbortSignal,
  query = "",
  host = shownHost(),
): Promise<Response> {
  const [method, url] = path(call, parameters, host);
  const headers: Record<string, string> = { authorization: `Bearer ${token() ?? ""}` };
  if (body) headers["content-type"] = "application/json";
  let answer: Response;
  try {
    answer = await fetch(url + query, {
      method,
      headers,
      body: body ? JSON.stringify(body) : null,
      cache: "no-store",
      signal: signal ?? null,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure(0, { code: "unreachable", message: "the host does not answer" });
  }
  if (answer.ok) return answer;
  const failed = await failure(answer);
  if (answer.status === 401) onRefused();
  throw failed;
}

async function failure(answer: Response): Promise<Failure> {
  const unknown: ApiError = { code: "internal", message: `the host answered ${answer.status}` };
  const api = await answer.json().catch(() => unknown);
  return new Failure(answer.status, typeof api?.message === "string" ? api : unknown);
}

/** Makes a call whose answer is JSON, or nothing. */
export async function call<T>(name: Call, parameters: string[] = [], body?: object): Promise<T> {
  const answer = await send(name, parameters, body);
  const text = await answer.text();
  return (text ? JSON.parse(text) : undefined) as T;
}

/** Makes a call without parameters at a host of the page. */
export async function callAt<T>(host: string, name: Call): Promise<T> {
  return (await (await send(name, [], undefined, undefined, "", host)).json()) as T;
}

/** The end of a machine's console log. */
export async function consoleLog(name: string): Promise<string> {
  return (await send("GET /v1/machines/{name}/console/log", [name])).text();
}

/**
 * States of an operation until it has ended. An EventSource could not send the token, so the lines are read
 * from the body of an ordinary request.
 */
export async function* watch(id: number, signal: AbortSignal): AsyncGenerator<Operation> {
  const answer = await send("GET /v1/operations/{id}/events", [String(id)], undefined, signal);
  for await (const lines of linesOf(answer))
    for (const line of lines) if (line) yield JSON.parse(line) as Operation;
}

/**
 * Events of the host after the one with this number, then those to come: those that arrived together, first
 * of all none, once the host has answered.
 */
export async function* events(since: number | undefined, signal: AbortSignal): AsyncGenerator<HostEvent[]> {
  const query = since === undefined ? "" : `?since=${since}`;
  const answer = await send("GET /v1/events", [], undefined, signal, query);
  yield [];
  for await (const lines of linesOf(answer)) {
    const news = lines.filter((line) => line.startsWith("data: "));
    yield news.map((line) => JSON.parse(line.slice("data: ".length)) as HostEvent);
  }
}

/** The trace of what a machine writes, as it grows, until `signal` ends it or the time has passed. */
export async function* dirtyTrace(
  name: string,
  request: { sample_ms: number; duration_ms: number },
  signal: AbortSignal,
): AsyncGenerator<Uint8Array> {
  const answer = await send("POST /v1/machines/{name}/wws", [name], request, signal);
  const reader = answer.body!.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

/** Whole lines of an answer, as they come. */
async function* linesOf(answer: Response): AsyncGenerator<string[]> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n");
    text = lines.pop() ?? "";
    yield lines;
  }
}

/**
 * Opens the serial console or the screen of a machine. A browser cannot set headers of a WebSocket, so the token
 * is among the offered subprotocols, which the daemon reads and does not log.
 */
export function openSocket(kind: "console" | "display", name: string): WebSocket {
  const [, url] = path(`GET /v1/machines/{name}/${kind}`, [name]);
  const socket = new WebSocket(url, [`whimbrel-${kind}`, `bearer.${token() ?? ""}`]);
  socket.binaryType = "arraybuffer";
  return socket;
}
