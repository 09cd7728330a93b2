// Builds the page: web/dist is what the daemon embeds. The names of its files are fixed, because the daemon
// names them, and no file holds a path or a time, so equal sources give equal bytes.
import { build } from "esbuild";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { writeSchema } from "./schema.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "dist");
process.chdir(here);

writeSchema("../docs/openapi.json", "src/schema.ts");
rmSync(out, { recursive: true, force: true });
mkdirSync(out);
await build({
  absWorkingDir: here,
  // The console, the screen and the charts come when they are first needed; none shares code with the rest.
  entryPoints: {
    app: "src/app.tsx",
    console: "src/console.ts",
    display: "src/display.ts",
    chart: "src/chart.ts",
  },
  outdir: out,
  bundle: true,
  format: "esm",
  target: ["es2022"],
  minify: true,
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  external: ["/console.js", "/display.js", "/chart.js"],
});
cpSync("static", out, { recursive: true });
writeFileSync(
  join(out, "licences.txt"),
  licences(["preact", "@novnc/novnc", "@xterm/xterm", "@xterm/addon-fit", "uplot"]),
);

/** The file with the licence of a library. */
function licenceFile(folder) {
  return readdirSync(folder).find((name) => /^LICENSE(\.\w+)?$/.test(name));
}

/** What the licences of the libraries in the page ask to be passed on with it. */
function licences(names) {
  return names
    .map((name) => {
      const folder = join("node_modules", name);
      const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      return `${name} ${version}\n\n${readFileSync(join(folder, licenceFile(folder)), "utf8").trim()}\n`;
    })
    .join(`\n${"-".repeat(72)}\n\n`);
}
