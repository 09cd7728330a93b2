// Migrations that this host started: those under way, with their rounds as they end, and the past ones.
import { bytes, duration, plural, time } from "../format";
import { Rounds } from "../lazy";
import { Badge, Facts, Head, Loaded, Section, Table } from "../parts";
import type { DowntimeInfo, MigrationRecord, Operation } from "../schema";
import { usePoll } from "../state";
import { CancelButton, Progress, stageText } from "./operations";

export function Migrations() {
  const past = usePoll<MigrationRecord[]>("GET /v1/migrations", [], 5000);
  const operations = usePoll<Operation[]>("GET /v1/operations", [], 1000);
  const running = (operations.data ?? []).filter((one) => one.kind === "migrate" && one.state === "running");
  return (
    <>
      <Head title="Migrations" note={past.data && plural(past.data.length, "past migration")} />
      {running.map((operation) => (
        <Section
          key={operation.id}
          title={`Now: ${operation.subject}`}
          tools={<CancelButton operation={operation} />}
        >
          <p>
            <Progress operation={operation} /> {stageText(operation)}
          </p>
          <p>
            <a href={`#/operations/${operation.id}`}>Watch its rounds</a>
          </p>
        </Section>
      ))}
      <Loaded polled={past}>
        {(all) => (
          <Table
            label="Past migrations"
            rows={all}
            rowKey={(one) => one.id}
            empty="No machine was migrated from this host."
            columns={[
              { name: "Machine", cell: (one) => <a href={`#/migrations/${one.id}`}>{one.machine}</a> },
              { name: "To", cell: (one) => one.request.host },
              {
                name: "End",
                cell: (one) => <Badge tone={one.end === "moved" ? "good" : "bad"} text={one.end} />,
              },
              { name: "Started", kind: "number", minor: true, cell: (one) => time(one.started_ms) },
              { name: "Took", kind: "number", cell: (one) => duration(one.total_ms) },
              {
                name: "Downtime",
                kind: "number",
                cell: (one) => (one.end === "moved" ? duration(one.downtime_ms) : "–"),
              },
              {
                name: "Sent",
                kind: "number",
                minor: true,
                cell: (one) => (one.end === "moved" ? bytes(one.wire_bytes) : "–"),
              },
              { name: "Rounds", kind: "number", minor: true, cell: (one) => one.rounds.length },
              {
                name: "Reason",
                kind: "wide",
                minor: true,
                cell: (one) => (one.end === "failed" ? one.reason : one.stopped_by.replaceAll("_", " ")),
              },
            ]}
          />
        )}
      </Loaded>
    </>
  );
}

export function Migration({ id }: { id: string }) {
  const past = usePoll<MigrationRecord[]>("GET /v1/migrations", [], 30_000);
  return (
    <>
      <p class="path">
        <a href="#/migrations">Migrations</a>
      </p>
      <Loaded polled={past}>
        {(all) => {
          const record = all.find((one) => one.id === id);
          return record ? <Record record={record} /> : <p class="empty">This host has no record of it.</p>;
        }}
      </Loaded>
    </>
  );
}

/** Modes as the command line and the manual name them. */
const MODES = { live: "precopy", lazy: "postcopy", hybrid: "hybrid", stop: "offline" } as const;

function Record({ record }: { record: MigrationRecord }) {
  const moved = record.end === "moved" ? record : undefined;
  return (
    <>
      <Head title={`${record.machine} to ${record.request.host}`} note={time(record.started_ms)} />
      {record.end === "failed" && <p class="notice bad">{record.reason}</p>}
      <Facts
        facts={[
          ["Mode", MODES[record.request.mode ?? "live"]],
          ["Took", duration(record.total_ms)],
          ["Downtime", moved && duration(moved.downtime_ms)],
          ["Sent", moved && bytes(moved.wire_bytes)],
          ["Rounds ended because", moved?.stopped_by.replaceAll("_", " ")],
          ["Network", moved?.network.kind.replaceAll("_", " ")],
          ["Parts of the downtime", moved?.pause && parts(moved.pause)],
        ]}
      />
      <Section title="Rounds">
        <Rounds rounds={record.rounds} />
      </Section>
    </>
  );
}

const parts = (pause: DowntimeInfo): string =>
  (["stop", "scan", "devices", "pages", "load", "link", "commit", "start"] as const)
    .map((part) => `${part} ${duration(pause[`${part}_ms`])}`)
    .join(", ");
