// Types of the API for the page, from the document that the daemon serves (docs/openapi.json): a change of
// the API that the page does not know of is an error of its compiler.
import { readFileSync, writeFileSync } from "node:fs";

const SIMPLE = { integer: "number", number: "number", string: "string", boolean: "boolean", null: "null" };

function type(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.oneOf) return schema.oneOf.map((one) => `(${type(one)})`).join(" | ");
  if (schema.allOf) return schema.allOf.map((one) => `(${type(one)})`).join(" & ");
  if (Array.isArray(schema.type)) return schema.type.map((one) => type({ ...schema, type: one })).join(" | ");
  if (schema.prefixItems) return `[${schema.prefixItems.map(type).join(", ")}]`;
  if (schema.type === "array") return `(${type(schema.items)})[]`;
  if (schema.type === "object" && schema.properties) return object(schema);
  if (schema.type === "object") return `Record<string, ${type(schema.additionalProperties || {})}>`;
  return SIMPLE[schema.type] ?? "unknown";
}

function object({ properties, required = [] }) {
  const field = ([name, schema]) => `${name}${required.includes(name) ? "" : "?"}: ${type(schema)}`;
  return `{ ${Object.entries(properties).map(field).join("; ")} }`;
}

export function writeSchema(from, to) {
  const { components, paths } = JSON.parse(readFileSync(from, "utf8"));
  const types = Object.entries(components.schemas).map(
    ([name, schema]) => `export type ${name} = ${type(schema)};`,
  );
  const calls = Object.entries(paths).flatMap(([path, methods]) =>
    Object.keys(methods).map((method) => JSON.stringify(`${method.toUpperCase()} ${path}`)),
  );
  const text = ["// Made by schema.mjs.", ...types, `export type Call = ${calls.join(" | ")};`, ""].join(
    "\n",
  );
  writeFileSync(to, text);
}
