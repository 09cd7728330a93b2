// Sessions: directories of servers that are mounted on this host, and what their servers do not have yet.
import { bytes, duration, percent, plural } from "../format";
import { Badge, Bar, Facts, Head, Loaded, Section } from "../parts";
import type { SessionInfo } from "../schema";
import { usePoll } from "../state";

export function Sessions() {
  const polled = usePoll<SessionInfo[]>("GET /v1/sessions", [], 3000);
  return (
    <>
      <Head title="Sessions" />
      <Loaded polled={polled}>
        {(all) =>
          all.length ? (
            all.map((one) => <Session key={one.name} session={one} />)
          ) : (
            <p class="empty">
              Nothing is mounted here. <code>whimbrel mount SERVER:/DIRECTORY /mnt</code> mounts a directory.
            </p>
          )
        }
      </Loaded>
    </>
  );
}

function Session({ session }: { session: SessionInfo }) {
  return (
    <Section
      title={session.name}
      tools={
        <Badge
          tone={session.connected ? "good" : "warn"}
          text={session.connected ? "connected" : "not connected"}
        />
      }
    >
      <Bar done={session.cache_used} total={session.cache_capacity} label={`Cache of ${session.name}`} />
      <Facts
        facts={[
          ["Mounted at", <code>{session.mount}</code>],
          ["Of", <code>{`${session.server}:${session.directory}`}</code>],
          ["Not yet at the server", unsent(session)],
          ["Cache", `${bytes(session.cache_used)} of ${bytes(session.cache_capacity)}`],
          ["Reads that the cache answered", session.hit_ratio != null && percent(session.hit_ratio)],
          ["Round trip", session.round_trip_ms != null && duration(session.round_trip_ms)],
          ["Connection lost", session.broken > 0 && plural(session.broken, "time")],
        ]}
      />
      {!!session.events?.length && <pre class="log">{session.events.join("\n")}</pre>}
    </Section>
  );
}

function unsent({ unsent_bytes, unsent_files, unsent_names }: SessionInfo): string {
  if (unsent_bytes + unsent_files + unsent_names === 0) return "nothing";
  const names = unsent_names ? `, ${plural(unsent_names, "name")} to change` : "";
  return `${bytes(unsent_bytes)} in ${plural(unsent_files, "file")}${names}`;
}
