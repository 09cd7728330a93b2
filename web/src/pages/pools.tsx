// Pools: their benefactors, their space, the copies that are missing, and how far each disk was checked.
import { bytes, count, duration, percent, plural } from "../format";
import { Badge, Bar, Facts, Head, Loaded, Section, Table } from "../parts";
import type { PoolBenefactor, PoolInfo, PoolState } from "../schema";
import { usePoll } from "../state";

export function Pools() {
  const polled = usePoll<PoolInfo[]>("GET /v1/pools", [], 10_000);
  return (
    <>
      <Head title="Pools" />
      <Loaded polled={polled}>
        {(all) =>
          all.length ? (
            all.map((one) => <Pool key={one.managers} pool={one} />)
          ) : (
            <p class="empty">
              This host knows no pool. It knows those that capsules are pushed to, and those of{" "}
              <code>whimbrel host --pool</code>.
            </p>
          )
        }
      </Loaded>
    </>
  );
}

/** The addresses of the managers, without their keys. */
const addresses = (managers: string): string =>
  managers
    .split(",")
    .map((manager) => manager.split("/")[0])
    .join(", ");

function Pool({ pool }: { pool: PoolInfo }) {
  const name = addresses(pool.managers);
  return (
    <Section title={`Pool of ${name}`} tools={pool.state && <Health state={pool.state} />}>
      {pool.problem && (
        <p class="notice bad" role="alert">
          {pool.problem}
        </p>
      )}
      {pool.state && <State state={pool.state} name={name} />}
    </Section>
  );
}

function Health({ state }: { state: PoolState }) {
  if (state.lost > 0) return <Badge tone="bad" text={`${plural(state.lost, "chunk")} without a copy`} />;
  if (state.short_of_copies > 0)
    return <Badge tone="warn" text={`${plural(state.short_of_copies, "chunk")} to copy`} />;
  return <Badge tone="good" text="all copies there" />;
}

function State({ state, name }: { state: PoolState; name: string }) {
  const sum = (of: (one: PoolBenefactor) => number) =>
    state.benefactors.reduce((all, one) => all + of(one), 0);
  const [used, free] = [sum((one) => one.used), sum((one) => one.free)];
  const saved = state.unique > 0 && state.logical > state.unique;
  return (
    <>
      <Bar done={used} total={used + free} label={`Room of the pool of ${name}`} />
      <Facts
        facts={[
          ["Used", `${bytes(used)}, ${bytes(free)} free`],
          ["Files", `${plural(state.versions, "version")} of ${plural(state.files, "file")}`],
          ["All versions", bytes(state.logical)],
          ["Saved", saved && `${(state.logical / state.unique).toFixed(1)} times`],
          ["Copied in", state.repaired_in_s != null && duration(state.repaired_in_s * 1000)],
          ["Being written", state.writing > 0 && plural(state.writing, "file")],
          ["Pinned", state.pinned > 0 && plural(state.pinned, "version")],
          ["Backup", state.backup_age_s != null ? `${duration(state.backup_age_s * 1000)} old` : "none"],
        ]}
      />
      <Table
        label={`Benefactors of ${name}`}
        rows={state.benefactors}
        rowKey={(one) => one.name}
        empty="No benefactor has joined."
        columns={[
          { name: "Benefactor", cell: (one) => one.name },
          { name: "State", cell: (one) => <Badge tone={tone(one.state)} text={one.state} /> },
          { name: "Used", kind: "number", cell: (one) => bytes(one.used) },
          { name: "Free", kind: "number", cell: (one) => bytes(one.free) },
          { name: "Faults", kind: "number", minor: true, cell: (one) => count(one.faults) },
          { name: "Checked", kind: "wide", cell: scrubbed },
          { name: "Heard", minor: true, cell: (one) => `${duration(one.silent_s * 1000)} ago` },
        ]}
      />
    </>
  );
}

const tone = (state: string): string =>
  ({ online: "good", offline: "warn", draining: "busy" })[state] ?? "bad";

function scrubbed({ scrub }: PoolBenefactor): string {
  if (!scrub) return "";
  const part = percent(Math.min(1, scrub.checked / Math.max(scrub.of, 1)));
  const last = scrub.ended_s != null ? `, all ${duration(scrub.ended_s * 1000)} ago` : "";
  const late = scrub.late ? ", too slow for its interval" : "";
  const damaged = scrub.damaged ? `, ${count(scrub.damaged)} damaged` : "";
  return part + last + damaged + late;
}
