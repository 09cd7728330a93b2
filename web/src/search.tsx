// Search: one field that leads to a machine, capsule, network or schedule by a part of its name.
import { useState } from "preact/hooks";
import { call, may } from "./api";
import { capsuleName } from "./capsule_actions";
import type { Call, CapsuleInfo, MachineInfo, NetworkInfo, ScheduleInfo } from "./schema";
import { sayFailure } from "./state";

interface Found {
  /** Its name and its kind, as the list shows them. */
  text: string;
  /** What else it is found by. */
  also: string;
  place: string;
}

const SHOWN = 12;

const labels = (all: Record<string, string> | undefined): string =>
  Object.entries(all ?? {})
    .map((label) => label.join("="))
    .join(" ");

/** All that can be found, as far as the token may see it. */
async function everything(): Promise<Found[]> {
  const list = <T,>(name: Call): Promise<T[]> => (may(name) ? call<T[]>(name, []) : Promise.resolve([]));
  const [machines, capsules, networks, schedules] = await Promise.all([
    list<MachineInfo>("GET /v1/machines"),
    list<CapsuleInfo>("GET /v1/capsules"),
    list<NetworkInfo>("GET /v1/networks"),
    list<ScheduleInfo>("GET /v1/schedules"),
  ]);
  return [
    ...machines.map(({ name, settings }) => ({
      text: `${name}, machine`,
      also: `${labels(settings?.labels)} ${settings?.note ?? ""}`,
      place: `machines/${name}`,
    })),
    ...capsules.map((capsule) => ({
      text: `${capsuleName(capsule)}, capsule`,
      also: `${capsule.id} ${capsule.names.join(" ")} ${labels(capsule.labels)}`,
      place: `capsules/${capsule.id}`,
    })),
    ...networks.map(({ name }) => ({ text: `${name}, network`, also: "", place: "networks" })),
    ...schedules.map(({ name }) => ({ text: `${name}, schedule`, also: "", place: `schedules/${name}` })),
  ];
}

export function Search() {
  const [all, setAll] = useState<Found[]>([]);
  const [text, setText] = useState("");
  const wanted = text.trim().toLowerCase();
  const fits = (one: Found) => `${one.text} ${one.also}`.toLowerCase().includes(wanted);
  // Names that begin so come first.
  const begins = (one: Found) => Number(one.text.toLowerCase().startsWith(wanted));
  const matches = wanted ? all.filter(fits).sort((a, b) => begins(b) - begins(a)) : [];
  const load = () =>
    everything().then(setAll, (error) => {
      sayFailure("search", error);
    });
  const go = (place: string) => {
    location.hash = `#/${place}`;
    setText("");
  };
  const typed = (value: string) => {
    const chosen = all.find((one) => one.text === value);
    chosen ? go(chosen.place) : setText(value);
  };
  return (
    <form
      role="search"
      class="find"
      onSubmit={(event) => {
        event.preventDefault();
        if (matches[0]) go(matches[0].place);
      }}
    >
      <input
        type="search"
        aria-label="Search"
        placeholder="Search"
        list="found"
        autocomplete="off"
        value={text}
        onFocus={() => void load()}
        onInput={(event) => typed((event.target as HTMLInputElement).value)}
      />
      <datalist id="found">
        {matches.slice(0, SHOWN).map((one) => (
          <option key={one.place + one.text} value={one.text} />
        ))}
      </datalist>
    </form>
  );
}
