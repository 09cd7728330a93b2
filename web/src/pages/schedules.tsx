// Work that the host does by itself: what is due, what came of the last runs, and what they left.
import { may } from "../api";
import { ask } from "../dialog";
import { age, duration, plural, time } from "../format";
import { Badge, Facts, Head, Loaded, Section, Table } from "../parts";
import type { ScheduledRun, ScheduledWork, ScheduleInfo, ScheduleReport } from "../schema";
import { act, say, usePoll } from "../state";

const HOUR = 3_600_000;

/** What a schedule does, in words. */
function workText(work: ScheduledWork): string {
  switch (work.kind) {
    case "checkpoint":
      return `${work.disks_only ? "checkpoint of the disks" : "checkpoint"} of ${work.machine}`;
    case "push":
      return `push of ${work.machine} to ${work.host ?? work.pool ?? "?"}`;
    case "verify":
      return `verification of ${work.bucket ?? "the store"}`;
    case "gc":
      return work.bucket ? `garbage collection in ${work.bucket}` : "garbage collection";
  }
}

/** Which capsules stay, in words. */
function retainText(work: ScheduledWork): string | undefined {
  if (work.kind !== "checkpoint" && work.kind !== "push") return undefined;
  const rule = work.retain;
  if (!rule) return "all";
  const parts = (["last", "hourly", "daily", "weekly", "monthly"] as const).filter((part) => rule[part]);
  return parts.map((part) => `${rule[part]} ${part}`).join(", ") || "none but the newest";
}

function RunBadge({ run, running }: { run: ScheduledRun | undefined; running: boolean }) {
  if (running) return <Badge tone="busy" text="running" />;
  if (!run) return <Badge tone="quiet" text="never ran" />;
  return <Badge tone={run.succeeded ? "good" : "bad"} text={run.succeeded ? "succeeded" : "failed"} />;
}

const due = (one: ScheduleInfo): string =>
  one.next_ms <= Date.now() ? "now" : `in ${duration(one.next_ms - Date.now())}`;

const running = (all: ScheduleInfo[]): boolean => all.some((one) => one.running);

export function Schedules() {
  const polled = usePoll<ScheduleInfo[]>("GET /v1/schedules", [], 5000, running);
  return (
    <>
      <Head title="Schedules" note="what the host does by itself">
        {may("POST /v1/schedules") && (
          <button type="button" class="primary" onClick={() => void create()}>
            Create a schedule
          </button>
        )}
      </Head>
      <Loaded polled={polled}>
        {(all) => (
          <Table
            label="Schedules"
            rows={all}
            rowKey={(one) => one.name}
            empty="Nothing is done by itself."
            columns={[
              { name: "Schedule", cell: (one) => <a href={`#/schedules/${one.name}`}>{one.name}</a> },
              { name: "Last run", cell: (one) => <RunBadge run={one.runs.at(-1)} running={one.running} /> },
              { name: "Every", kind: "number", minor: true, cell: (one) => duration(one.every_ms) },
              { name: "Next", kind: "number", minor: true, cell: (one) => due(one) },
              { name: "Work", kind: "wide", cell: (one) => workText(one.work) },
            ]}
          />
        )}
      </Loaded>
    </>
  );
}

export function Schedule({ name }: { name: string }) {
  const polled = usePoll<ScheduleInfo>("GET /v1/schedules/{name}", [name], 5000, (one) => one.running);
  return (
    <>
      <p class="path">
        <a href="#/schedules">Schedules</a>
      </p>
      <Head
        title={name}
        note={polled.data && <RunBadge run={polled.data.runs.at(-1)} running={polled.data.running} />}
      >
        {polled.data && <Tools schedule={polled.data} />}
      </Head>
      <Loaded polled={polled}>{(one) => <View schedule={one} />}</Loaded>
    </>
  );
}

function Tools({ schedule: { name, running, work } }: { schedule: ScheduleInfo }) {
  return (
    <>
      {may("POST /v1/schedules/{name}/run") && (
        <>
          <button type="button" disabled={running} onClick={() => void runNow(name)}>
            Run now
          </button>
          {work.kind === "checkpoint" && (
            <button type="button" onClick={() => void tryRule(name)}>
              What would be removed?
            </button>
          )}
        </>
      )}
      {may("DELETE /v1/schedules/{name}") && (
        <button type="button" class="quiet-danger" onClick={() => void remove(name)}>
          Delete
        </button>
      )}
    </>
  );
}

function View({ schedule }: { schedule: ScheduleInfo }) {
  const { work, tags = [] } = schedule;
  return (
    <>
      <Facts
        facts={[
          ["Work", workText(work)],
          ["Machine", "machine" in work && <a href={`#/machines/${work.machine}`}>{work.machine}</a>],
          ["Every", duration(schedule.every_ms)],
          ["Next run", `${time(schedule.next_ms)} (${due(schedule)})`],
          ["Capsules that stay", retainText(work)],
          ["Created", time(schedule.created_ms)],
        ]}
      />
      <Section title="Runs">
        <Table
          label="Runs"
          rows={[...schedule.runs].reverse()}
          rowKey={(run) => String(run.started_ms)}
          empty="It has not run yet."
          columns={[
            {
              name: "Started",
              cell: (run) => <span title={time(run.started_ms)}>{age(run.started_ms)} ago</span>,
            },
            { name: "Outcome", cell: (run) => <RunBadge run={run} running={false} /> },
            {
              name: "Took",
              kind: "number",
              minor: true,
              cell: (run) => duration(run.ended_ms - run.started_ms),
            },
            { name: "What it did", kind: "wide", cell: (run) => <span title={run.text}>{run.text}</span> },
          ]}
        />
      </Section>
      {work.kind === "checkpoint" && (
        <Section title="Capsules">
          <Table
            label="Capsules"
            rows={[...tags].reverse()}
            rowKey={(tag) => tag}
            empty="None of its capsules is there."
            columns={[
              { name: "Capsule", kind: "wide", cell: (tag) => <a href={`#/capsules/${tag}`}>{tag}</a> },
            ]}
          />
        </Section>
      )}
    </>
  );
}

async function runNow(name: string): Promise<void> {
  const done = await act<ScheduleReport>(`Run ${name}`, "POST /v1/schedules/{name}/run", [name], {});
  if (done?.run) say(done.run.succeeded ? "good" : "bad", `${name}: ${done.run.text}`);
}

async function tryRule(name: string): Promise<void> {
  const body = { dry_run: true };
  const report = await act<ScheduleReport>(`Try ${name}`, "POST /v1/schedules/{name}/run", [name], body);
  if (!report) return;
  const removed = report.removed.length > 0 ? `: ${report.removed.join(", ")}` : "";
  say("good", `${name} would remove ${plural(report.removed.length, "capsule")}${removed}`);
}

async function remove(name: string): Promise<void> {
  const given = await ask({
    title: `Delete ${name}`,
    text: "It does not run any more. Its capsules stay.",
    button: "Delete",
    danger: true,
  });
  if (!given) return;
  await act(`Delete ${name}`, "DELETE /v1/schedules/{name}", [name]);
  location.hash = "#/schedules";
}

async function create(): Promise<void> {
  const given = await ask({
    title: "Create a schedule",
    text: "Runs begin at multiples of the interval (UTC). A missed one is made up for.",
    fields: [
      { name: "name", label: "Name" },
      {
        name: "kind",
        label: "Work",
        kind: "choice",
        value: "checkpoint",
        choices: [
          { value: "checkpoint", label: "checkpoint of a machine" },
          { value: "push", label: "push of a machine's newest capsule to a host" },
          { value: "verify", label: "verification of the store" },
          { value: "gc", label: "garbage collection" },
        ],
      },
      { name: "machine", label: "Machine", optional: true, hint: "Of a checkpoint or a push." },
      { name: "host", label: "Host", optional: true, hint: "Of a push." },
      { name: "hours", label: "Every so many hours", kind: "number", value: "24" },
      { name: "last", label: "Capsules to retain", kind: "number", optional: true, hint: "None: all." },
    ],
    button: "Create",
  });
  if (!given) return;
  const { name, kind, machine, host, hours, last } = given;
  const retain = last ? { retain: { last: Number(last) } } : {};
  const works: Record<string, object> = {
    checkpoint: { kind, machine, ...retain },
    push: { kind, machine, host, ...retain },
  };
  const body = { name, work: works[kind ?? ""] ?? { kind }, every_ms: Math.round(Number(hours) * HOUR) };
  await act(`Create ${name}`, "POST /v1/schedules", [], body);
}
