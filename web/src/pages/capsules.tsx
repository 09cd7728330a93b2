// Capsules as a tree: which state came from which, what each added, and what can be done with it.
import { useState } from "preact/hooks";
import { call, Failure } from "../api";
import { capsuleActions, capsuleName } from "../capsule_actions";
import { age, bytes, count, plural, short, time } from "../format";
import { Badge, Facts, Head, Loaded, Section, Table } from "../parts";
import type { CapsuleDiff, CapsuleInfo, GraphNode, StoreUsage, HostInfo } from "../schema";
import { usePoll } from "../state";

/** A capsule with its place in the tree. */
interface Placed {
  node: GraphNode;
  depth: number;
}

/** Every capsule once, below its first parent that is shown; the newest family comes first. */
export function placed(nodes: GraphNode[]): Placed[] {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const children = new Map<string, GraphNode[]>();
  const roots: GraphNode[] = [];
  for (const node of nodes) {
    const parent = node.under.find((id) => known.has(id));
    if (parent === undefined) roots.push(node);
    else children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const list: Placed[] = [];
  const waiting: Placed[] = roots.sort((a, b) => a.time_ms - b.time_ms).map((node) => ({ node, depth: 0 }));
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    list.push(next);
    const below = (children.get(next.node.id) ?? []).sort((a, b) => b.time_ms - a.time_ms);
    // A line of versions stays at one depth; only branches step in.
    const depth = below.length > 1 || next.depth === 0 ? next.depth + 1 : next.depth;
    waiting.push(...below.map((node) => ({ node, depth })));
  }
  return list;
}

export function Capsules() {
  const polled = usePoll<GraphNode[]>("GET /v1/graph", [], 5000);
  const host = usePoll<HostInfo>("GET /v1/host", [], 10_000);
  const [filter, setFilter] = useState("");
  const text = filter.trim().toLowerCase();
  const matches = (node: GraphNode) =>
    `${node.names.join(" ")} ${node.machine} ${node.id}`.toLowerCase().includes(text);
  return (
    <>
      <Head title="Capsules" note={host.data && usage(host.data.store)}>
        <input
          type="search"
          aria-label="Filter capsules"
          placeholder="Filter by name, machine or id"
          value={filter}
          onInput={(event) => setFilter((event.target as HTMLInputElement).value)}
        />
      </Head>
      <Loaded polled={polled}>
        {(all) => (
          <CapsuleTree
            nodes={all.filter(matches)}
            empty={
              all.length
                ? "No capsule matches."
                : "There is no capsule yet. A checkpoint of a machine makes one."
            }
          />
        )}
      </Loaded>
    </>
  );
}

function usage({ capsules, stored, logical }: StoreUsage): string {
  const saved =
    stored > 0 && logical > stored ? `, ${(logical / stored).toFixed(1)} times less than their images` : "";
  return `${plural(capsules, "capsule")} in ${bytes(stored)}${saved}`;
}

export function CapsuleTree({ nodes, empty }: { nodes: GraphNode[]; empty: string }) {
  return (
    <Table
      label="Capsules"
      rows={placed(nodes)}
      rowKey={({ node }) => node.id}
      empty={empty}
      columns={[
        { name: "Capsule", cell: ({ node, depth }) => <Name node={node} depth={depth} /> },
        { name: "Machine", minor: true, cell: ({ node }) => node.machine },
        {
          name: "Age",
          kind: "number",
          cell: ({ node }) => <span title={time(node.time_ms)}>{age(node.time_ms)}</span>,
        },
        { name: "Adds", kind: "number", cell: ({ node }) => (node.adds == null ? "–" : bytes(node.adds)) },
        {
          name: "Memory",
          kind: "number",
          minor: true,
          cell: ({ node }) => (node.active ? bytes(node.memory) : "disks only"),
        },
        { name: "Used by", minor: true, cell: ({ node }) => node.machines.map((one) => one.name).join(", ") },
        {
          name: "Actions",
          minor: true,
          unseen: true,
          kind: "wide",
          cell: ({ node }) => <CapsuleButtons capsule={node} />,
        },
      ]}
    />
  );
}

function Name({ node, depth }: { node: GraphNode; depth: number }) {
  return (
    <span class="branch" style={{ paddingInlineStart: `${Math.min(depth, 8) * 18}px` }}>
      {depth > 0 && <span class="twig" aria-hidden="true" />}
      <a href={`#/capsules/${node.id}`}>{capsuleName(node)}</a>
      {node.names.slice(1).map((name) => (
        <span key={name} class="tag">
          {name}
        </span>
      ))}
      {node.whole === false && <Badge tone="warn" text="partial" />}
    </span>
  );
}

export function CapsuleButtons({ capsule }: { capsule: CapsuleInfo }) {
  return (
    <span class="row-actions">
      {capsuleActions(capsule).map(({ name, danger, run }) => (
        <button
          key={name}
          type="button"
          class={danger ? "quiet-danger" : ""}
          aria-label={`${name} ${capsuleName(capsule)}`}
          onClick={() => void run(capsule)}
        >
          {name}
        </button>
      ))}
    </span>
  );
}

export function Capsule({ id }: { id: string }) {
  const polled = usePoll<GraphNode[]>("GET /v1/capsules/{capsule}/graph", [id], 5000);
  return (
    <>
      <p class="path">
        <a href="#/capsules">Capsules</a>
      </p>
      <Loaded polled={polled}>
        {(family) => {
          const capsule = family.find(
            (node) => node.id === id || node.id.startsWith(id) || node.names.includes(id),
          );
          return capsule ? (
            <Found capsule={capsule} family={family} />
          ) : (
            <p class="empty">This capsule is not in the store.</p>
          );
        }}
      </Loaded>
    </>
  );
}

function Found({ capsule, family }: { capsule: GraphNode; family: GraphNode[] }) {
  return (
    <>
      <Head title={capsuleName(capsule)} note={`of ${capsule.machine}, ${age(capsule.time_ms)} old`} />
      <div class="actions">
        <CapsuleButtons capsule={capsule} />
      </div>
      <Facts
        facts={[
          ["Id", <code>{capsule.id}</code>],
          ["Names", capsule.names.join(", ") || "none"],
          ["Taken", `${time(capsule.time_ms)} on ${capsule.host}`],
          [
            "Has",
            capsule.active
              ? `memory (${bytes(capsule.memory)}), devices and disks`
              : "disks only: a machine boots from it",
          ],
          ["Adds to its parent", capsule.adds == null ? undefined : bytes(capsule.adds)],
          ["Used by", capsule.machines.map((one) => one.name).join(", ")],
          [
            "Labels",
            Object.entries(capsule.labels)
              .map(([name, value]) => `${name}=${value}`)
              .join(", "),
          ],
        ]}
      />
      <Section title="Images">
        <Table
          label="Images"
          rows={capsule.images}
          rowKey={(image) => image.name}
          empty="It has no image."
          columns={[
            { name: "Image", cell: (image) => image.name },
            { name: "Size", kind: "number", cell: (image) => bytes(image.size) },
            { name: "Pages", kind: "number", cell: (image) => count(image.pages) },
            {
              name: "Root",
              kind: "wide",
              minor: true,
              cell: (image) => <code title={image.root}>{short(image.root)}</code>,
            },
          ]}
        />
      </Section>
      <Compare capsule={capsule} family={family} />
      <Section title="Family">
        <CapsuleTree nodes={family} empty="" />
      </Section>
    </>
  );
}

/** What changed between this capsule and another of its family. */
function Compare({ capsule, family }: { capsule: GraphNode; family: GraphNode[] }) {
  const others = family.filter((node) => node.id !== capsule.id);
  const [other, choose] = useState(capsule.under[0] ?? others[0]?.id ?? "");
  const [diff, setDiff] = useState<CapsuleDiff>();
  const [problem, setProblem] = useState<string>();
  if (others.length === 0) return null;
  const compare = async () => {
    setProblem(undefined);
    try {
      setDiff(await call<CapsuleDiff>("GET /v1/capsules/{capsule}/diff/{other}", [other, capsule.id]));
    } catch (error) {
      setProblem(error instanceof Failure ? error.message : String(error));
    }
  };
  return (
    <Section title="Changes since another capsule">
      <p class="inline-form">
        <select
          aria-label="Other capsule"
          value={other}
          onChange={(event) => choose((event.target as HTMLSelectElement).value)}
        >
          {others.map((node) => (
            <option key={node.id} value={node.id}>
              {capsuleName(node)}, {age(node.time_ms)} old
            </option>
          ))}
        </select>
        <button type="button" onClick={() => void compare()}>
          Compare
        </button>
      </p>
      {problem && <p class="notice bad">{problem}</p>}
      {diff && (
        <Table
          label="Changes"
          rows={diff.images}
          rowKey={(image) => image.name}
          empty="No image changed."
          columns={[
            { name: "Image", cell: (image) => image.name },
            { name: "Changed pages", kind: "number", cell: (image) => count(image.changed) },
            { name: "Of", kind: "number", cell: (image) => count(image.pages_b) },
            { name: "New contents", kind: "number", cell: (image) => count(image.new_contents) },
          ]}
        />
      )}
    </Section>
  );
}
