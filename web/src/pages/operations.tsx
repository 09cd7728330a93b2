// Work that runs or has ended lately, as it goes on, and how to cancel it.
import { useEffect, useState } from "preact/hooks";
import { may, watch } from "../api";
import { age, bytes, count, duration, short } from "../format";
import { Rounds } from "../lazy";
import { Badge, Bar, Head, Loaded, Section, Table } from "../parts";
import type { Operation, OperationResult, OperationState } from "../schema";
import { act, usePoll } from "../state";

const TONES: Record<OperationState["state"], string> = {
  running: "busy",
  succeeded: "good",
  failed: "bad",
  cancelled: "quiet",
};

/** What came of an operation, of those that have more to say than that they are done. */
function resultText(result: OperationResult): string | undefined {
  switch (result.kind) {
    case "checkpoint":
    case "suspend":
      return `capsule ${short(result.capsule)}: pause ${duration(result.pause_ms)}, took ${duration(result.total_ms)}, added ${bytes(result.bytes_added)}`;
    case "rewind":
      return `${result.machine}: running as of ${short(result.capsule)} after ${duration(result.to_running_ms)}; tag of the state before: ${result.tag}`;
    case "resume":
    case "clone":
      return `${result.machines.join(", ")}: running after ${duration(result.to_running_ms)}`;
    case "migrate":
      return `to ${result.host}: downtime ${duration(result.downtime_ms)}, took ${duration(result.total_ms)}, sent ${bytes(result.wire_bytes)}`;
    case "protect":
      return `standby on ${result.host}: pause ${duration(result.pause_ms)}, took ${duration(result.total_ms)}`;
    case "failover":
      return `to ${result.host}: downtime ${duration(result.downtime_ms)}`;
    case "gc":
      return `freed ${bytes(result.freed)}, the store has ${bytes(result.stored)}`;
    case "verify":
      return `${count(result.objects)} objects of ${count(result.capsules)} capsules, ${result.damaged.length} damaged`;
    default:
      return undefined;
  }
}

/** What an operation does right now, or how it ended. */
export function stageText(operation: Operation): string {
  const { progress } = operation;
  if (operation.state === "failed") return operation.error.message;
  if (operation.state === "cancelled") return operation.left;
  if (operation.state === "succeeded") return resultText(operation.result) ?? progress.detail ?? "";
  const unit = (number: number) => (progress.unit === "bytes" ? bytes(number) : count(number));
  const total = progress.total ? ` of ${unit(progress.total)}` : "";
  const rate = progress.rate_per_s ? `, ${unit(Math.round(progress.rate_per_s))}/s` : "";
  return `${progress.stage}: ${unit(progress.done)}${total}${rate}`;
}

export function Progress({ operation }: { operation: Operation }) {
  const { progress } = operation;
  if (operation.state !== "running") return null;
  return progress.total ? (
    <Bar done={progress.done} total={progress.total} label={progress.stage} />
  ) : (
    <progress aria-label={progress.stage} />
  );
}

export function CancelButton({ operation }: { operation: Operation }) {
  if (operation.state !== "running" || !may("DELETE /v1/operations/{id}")) return null;
  const name = `${operation.kind} ${operation.subject}`;
  const cancel = () => act(`Cancel ${name}`, "DELETE /v1/operations/{id}", [String(operation.id)]);
  return (
    <button type="button" class="quiet-danger" aria-label={`Cancel ${name}`} onClick={() => void cancel()}>
      Cancel
    </button>
  );
}

export function Operations() {
  const polled = usePoll<Operation[]>("GET /v1/operations", [], 1000, (all) =>
    all.some((one) => one.state === "running"),
  );
  return (
    <>
      <Head title="Operations" note="those that run, and those that ended lately" />
      <Loaded polled={polled}>
        {(all) => (
          <Table
            label="Operations"
            rows={[...all].sort((a, b) => b.id - a.id)}
            rowKey={(one) => String(one.id)}
            empty="Nothing runs, and nothing has ended lately."
            columns={[
              { name: "Operation", cell: (one) => <a href={`#/operations/${one.id}`}>{one.kind}</a> },
              { name: "Of", cell: (one) => one.subject },
              { name: "State", cell: (one) => <Badge tone={TONES[one.state]} text={one.state} /> },
              { name: "Started", kind: "number", minor: true, cell: (one) => `${age(one.started_ms)} ago` },
              {
                name: "Progress",
                kind: "wide",
                cell: (one) => (
                  <>
                    <Progress operation={one} /> {stageText(one)}
                  </>
                ),
              },
              {
                name: "Actions",
                unseen: true,
                kind: "tight",
                cell: (one) => <CancelButton operation={one} />,
              },
            ]}
          />
        )}
      </Loaded>
    </>
  );
}

/** One operation, followed by its stream of states. */
export function OperationPage({ id }: { id: string }) {
  const [operation, show] = useState<Operation>();
  const [problem, setProblem] = useState<string>();
  useEffect(() => {
    const abort = new AbortController();
    const follow = async () => {
      try {
        for await (const state of watch(Number(id), abort.signal)) show(state);
      } catch (error) {
        if (!abort.signal.aborted) setProblem(error instanceof Error ? error.message : String(error));
      }
    };
    void follow();
    return () => abort.abort();
  }, [id]);
  const rounds = operation && roundsOf(operation);
  return (
    <>
      <p class="path">
        <a href="#/operations">Operations</a>
      </p>
      <Head
        title={operation ? `${operation.kind} ${operation.subject}` : `Operation ${id}`}
        note={operation && <Badge tone={TONES[operation.state]} text={operation.state} />}
      >
        {operation && <CancelButton operation={operation} />}
      </Head>
      {problem && <p class="notice bad">{problem}</p>}
      {operation && (
        <div class="live" aria-live="polite">
          <Progress operation={operation} />
          <p>{stageText(operation)}</p>
          {operation.state === "failed" && operation.error.hint && <p class="hint">{operation.error.hint}</p>}
        </div>
      )}
      {rounds && rounds.length > 0 && (
        <Section title="Rounds">
          <Rounds rounds={rounds} />
        </Section>
      )}
    </>
  );
}

/** Rounds so far, or those of the result. */
function roundsOf(operation: Operation) {
  if (operation.state === "succeeded" && "rounds" in operation.result) return operation.result.rounds;
  return operation.progress.rounds ?? [];
}
