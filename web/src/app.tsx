// The page: logs in, and shows what the address after `#` names.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import {
  currentCaller,
  Failure,
  hostPlaces,
  login,
  logout,
  may,
  ofSeveral,
  showHost,
  shownHost,
  token,
  whenRefused,
} from "./api";
import { Dialogs } from "./dialog";
import { heard, listen } from "./live";
import { Capsule, Capsules } from "./pages/capsules";
import { Host } from "./pages/host";
import { Hosts } from "./pages/hosts";
import { Machine } from "./pages/machine";
import { Machines } from "./pages/machines";
import { Migration, Migrations } from "./pages/migrations";
import { Networks } from "./pages/networks";
import { Pools } from "./pages/pools";
import { Sessions } from "./pages/sessions";
import { CancelButton, OperationPage, Operations, Progress, stageText } from "./pages/operations";
import { Schedule, Schedules } from "./pages/schedules";
import type { Call, CallerInfo, HostInfo } from "./schema";
import { Search } from "./search";
import { close, forget, messages, sayFailure, usePoll, watched } from "./state";
import "./style.css";

const PLACES = [
  ["machines", "Machines"],
  ["capsules", "Capsules"],
  ["operations", "Operations"],
  ["migrations", "Migrations"],
  ["schedules", "Schedules"],
  ["networks", "Networks"],
  ["sessions", "Sessions"],
  ["pools", "Pools"],
  ["host", "Host"],
] as const;

/** Calls without which there is no such page. */
const CALLS: Record<string, Call> = { sessions: "GET /v1/sessions", pools: "GET /v1/pools" };

/** The parts of the address after `#/`. */
function usePlace(): string[] {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const [place, go] = useState(read);
  useEffect(() => {
    const moved = () => {
      go(read());
      scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Shows a place at a host of the page. */
type Visit = (host: string, place: string) => void;

function Shown({ place: [page = "", id, tab], visit }: { place: string[]; visit: Visit }) {
  switch (page) {
    case "hosts":
      return <Hosts visit={visit} />;
    case "capsules":
      return id ? <Capsule key={id} id={id} /> : <Capsules />;
    case "operations":
      return id ? <OperationPage key={id} id={id} /> : <Operations />;
    case "migrations":
      return id ? <Migration key={id} id={id} /> : <Migrations />;
    case "schedules":
      return id ? <Schedule key={id} name={id} /> : <Schedules />;
    case "networks":
      return <Networks />;
    case "sessions":
      return <Sessions />;
    case "pools":
      return <Pools />;
    case "host":
      return <Host />;
    default:
      return id ? <Machine key={id} name={id} tab={tab ?? ""} /> : <Machines />;
  }
}

interface ShellProps {
  caller: CallerInfo;
  leave: () => void;
  visit: Visit;
}

function Shell({ caller, leave, visit }: ShellProps) {
  const place = usePlace();
  const host = usePoll<HostInfo>("GET /v1/host", [], 30_000);
  const here = place[0] || "machines";
  useEffect(listen, [caller]);
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}
      >
        Skip to the content
      </a>
      <header class="side">
        <div class="brand">
          <img src="/icon.svg" alt="" width="26" height="26" />
          <span>
            Whimbrel
            <small>{host.data?.name ?? " "}</small>
          </span>
        </div>
        {ofSeveral && <HostChoice visit={visit} />}
        <Search />
        <nav aria-label="Pages">
          {ofSeveral && (
            <a href="#/hosts" aria-current={here === "hosts" ? "page" : undefined}>
              All hosts
            </a>
          )}
          {PLACES.filter(([name]) => CALLS[name] === undefined || may(CALLS[name])).map(([name, label]) => (
            <a key={name} href={`#/${name}`} aria-current={name === here ? "page" : undefined}>
              {label}
            </a>
          ))}
        </nav>
        <div class="user">
          <span>
            {caller.name}
            <small>{caller.role}</small>
          </span>
          <button type="button" onClick={leave}>
            Log out
          </button>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <Shown place={place} visit={visit} />
      </main>
      <Activity />
      <Dialogs />
    </>
  );
}

/** The host that is shown, for choosing another one. */
function HostChoice({ visit }: { visit: Visit }) {
  const shown = shownHost() ?? "";
  return (
    <select
      aria-label="Host"
      class="host-choice"
      value={shown}
      onChange={(event) => {
        const field = event.target as HTMLSelectElement;
        visit(field.value, "machines");
        // Until the host has answered, the one of before is shown.
        field.value = shown;
      }}
    >
      {hostPlaces().map(({ name }) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  );
}

/** Operations that were started here, and what became of them. */
function Activity() {
  const running = watched.use();
  const said = messages.use();
  return (
    <aside class="activity" aria-label="Activity">
      <div role="status">
        {running.map(({ operation, label }) => (
          <div class="card" key={operation.id}>
            <div class="card-head">
              <a href={`#/operations/${operation.id}`}>{label}</a>
              <CancelButton operation={operation} />
            </div>
            <Progress operation={operation} />
            <small>{stageText(operation)}</small>
          </div>
        ))}
        {said.map(({ id, kind, text, hint }) => (
          <div class={`card ${kind}`} key={id}>
            <div class="card-head">
              <span>{text}</span>
              <button type="button" aria-label="Close this message" onClick={() => close(id)}>
                ×
              </button>
            </div>
            {hint && <small>{hint}</small>}
          </div>
        ))}
      </div>
    </aside>
  );
}

function Login({ entered, note }: { entered: (caller: CallerInfo) => void; note: string | undefined }) {
  const [problem, setProblem] = useState(note);
  const [busy, setBusy] = useState(false);
  const enter = async (event: SubmitEvent) => {
    event.preventDefault();
    const field = (event.target as HTMLFormElement).elements.namedItem("token") as HTMLInputElement;
    setBusy(true);
    try {
      entered(await login(field.value.trim()));
    } catch (error) {
      setProblem(
        error instanceof Failure ? `${error.message}. ${error.api.hint ?? ""}` : "The host does not answer.",
      );
      field.select();
    }
    setBusy(false);
  };
  return (
    <main class="login">
      <form onSubmit={(event) => void enter(event)} aria-label="Log in">
        <img src="/icon.svg" alt="" width="40" height="40" />
        <h1>Whimbrel</h1>
        <label for="token">{ofSeveral ? "Password" : "Token"}</label>
        <input id="token" name="token" type="password" autocomplete="off" required autofocus />
        <p class="hint">
          {ofSeveral ? (
            <>
              <code>whimbrel web</code> has printed it.
            </>
          ) : (
            <>
              <code>whimbrel token create NAME --role operator</code> on the host makes one.
            </>
          )}{" "}
          It is kept until this tab is closed.
        </p>
        {problem && (
          <p class="notice bad" role="alert">
            {problem}
          </p>
        )}
        <button type="submit" class="primary" disabled={busy}>
          Log in
        </button>
      </form>
    </main>
  );
}

function Page() {
  const [caller, setCaller] = useState<CallerInfo | undefined>(currentCaller());
  const [note, setNote] = useState<string>();
  const [asked, setAsked] = useState(token() === null);
  useEffect(() => {
    whenRefused(() => {
      logout();
      setNote("This token is no longer accepted.");
      setCaller(undefined);
    });
    if (!asked) {
      login()
        .then(setCaller, () => logout())
        .finally(() => setAsked(true));
    }
  }, []);
  if (!asked) return null;
  if (!caller) return <Login entered={setCaller} note={note} />;
  const leave = () => {
    logout();
    setNote(undefined);
    setCaller(undefined);
  };
  const visit = (host: string, place: string) => {
    showHost(host).then(
      (caller) => {
        forget();
        heard.set([]);
        location.hash = `#/${place}`;
        setCaller(caller);
      },
      (error) => sayFailure(host, error),
    );
  };
  // What belongs to one host is not kept for another.
  return <Shell key={shownHost() ?? ""} caller={caller} leave={leave} visit={visit} />;
}

render(<Page />, document.getElementById("root")!);
