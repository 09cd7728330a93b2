//! Tools from the API's document. No I/O.
//!
//! The input of a tool has the parameters of the path, of the query and of the body side by side. Calls that
//! are streams or byte connections are left out, and so is the one whose answer is a new token.

use rmcp::model::{Tool, ToolAnnotations};
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

/// Calls without a tool: connections, streams, pages for programs, and secrets.
const LEFT_OUT: &[&str] = &["console", "wire", "dirty_trace", "events", "openapi", "metrics", "createToken"];
/// Calls that change nothing although they have a body.
const LOOK_BY_POST: &[&str] = &["match_golden", "cpuBaseline"];
/// Calls that only add something. All other changes may take something away.
const ADD: &[&str] = &[
    "run",
    "start",
    "unpause",
    "checkpoint",
    "resume",
    "clone",
    "derive",
    "pull",
    "pullImage",
    "verify",
    "createSchedule",
    "createNetwork",
];
/// Parameters that would make a stream of an answer.
const STREAMS: &[&str] = &["follow"];

/// What an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    /// JSON or text, which is passed on.
    Text,
    /// An operation that was started.
    Operation,
    /// Server-sent events, which are collected.
    Events,
}

/// A call of the API.
#[derive(Debug)]
pub(super) struct ApiTool {
    pub(super) name: String,
    pub(super) method: &'static str,
    pub(super) reply: Reply,
    path: String,
    about: String,
    query: BTreeSet<String>,
    has_body: bool,
    input: Map<String, Value>,
    changes: bool,
    destroys: bool,
}

/// Every tool that may be offered: `calls` are those of the caller, as `GET /v1/machines`.
pub(super) fn tools(document: &Value, allow_changes: bool, calls: &BTreeSet<&str>) -> Vec<ApiTool> {
    let paths = document["paths"].as_object().into_iter().flatten();
    let all = paths.flat_map(|(path, methods)| {
        let methods = methods.as_object().into_iter().flatten();
        methods.filter_map(|(method, call)| tool(document, path, method, call))
    });
    let allowed = |tool: &ApiTool| {
        (allow_changes || !tool.changes) && calls.contains(format!("{} {}", tool.method, tool.path).as_str())
    };
    let mut tools: Vec<ApiTool> = all.filter(allowed).collect();
    tools.sort_by(|a, b| a.name.cmp(&b.name));
    tools
}

fn tool(document: &Value, path: &str, method: &str, call: &Value) -> Option<ApiTool> {
    let id = call["operationId"].as_str().filter(|id| !LEFT_OUT.contains(id))?;
    let method =
        ["GET", "POST", "PUT", "DELETE"].into_iter().find(|name| name.eq_ignore_ascii_case(method))?;
    let (mut properties, mut required) = (Map::new(), Vec::new());
    let mut query = BTreeSet::new();
    for parameter in call["parameters"].as_array().into_iter().flatten() {
        let name = parameter["name"].as_str()?;
        match parameter["in"].as_str() {
            Some("query") if STREAMS.contains(&name) => continue,
            Some("query") => drop(query.insert(name.to_owned())),
            _ => required.push(json!(name)),
        }
        properties.insert(name.to_owned(), parameter["schema"].clone());
    }
    let body = &call["requestBody"]["content"]["application/json"]["schema"]["$ref"];
    if let Some(schema) = body.as_str().and_then(|reference| document.pointer(reference.strip_prefix('#')?)) {
        properties.extend(schema["properties"].as_object().cloned().unwrap_or_default());
        required.extend(schema["required"].as_array().cloned().unwrap_or_default());
    }
    let changes = method != "GET" && !LOOK_BY_POST.contains(&id);
    Some(ApiTool {
        name: snake_case(id),
        method,
        reply: reply(call),
        path: path.to_owned(),
        about: call["summary"].as_str().unwrap_or_default().to_owned(),
        query,
        has_body: !body.is_null(),
        input: input(document, properties, required),
        changes,
        destroys: changes && !ADD.contains(&id),
    })
}

fn reply(call: &Value) -> Reply {
    let responses = &call["responses"];
    match () {
        () if !responses["202"].is_null() => Reply::Operation,
        () if !responses["200"]["content"]["text/event-stream"].is_null() => Reply::Events,
        () => Reply::Text,
    }
}

/// Schema of the input, with the types that it refers to.
fn input(document: &Value, properties: Map<String, Value>, required: Vec<Value>) -> Map<String, Value> {
    let mut input = json!({
        "type": "object", "properties": properties, "required": required, "additionalProperties": false
    });
    let mut types = BTreeMap::new();
    let mut wanted = localise(&mut input);
    while let Some(name) = wanted.pop_first() {
        if let Entry::Vacant(place) = types.entry(name) {
            let mut schema = document["components"]["schemas"][place.key()].clone();
            wanted.extend(localise(&mut schema));
            place.insert(schema);
        }
    }
    if !types.is_empty() {
        input["$defs"] = json!(types);
    }
    input.as_object().cloned().unwrap_or_default()
}

/// Turns references into the document into references within one schema, and drops examples. A parameter
/// that may be null may be left out as well, so it has its other type only: some clients take no list of
/// types. The names of the types.
fn localise(schema: &mut Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    match schema {
        Value::Object(fields) => {
            fields.remove("examples");
            if let Some(Value::Array(kinds)) = fields.get("type")
                && let [one] = &*kinds.iter().filter(|kind| *kind != "null").collect::<Vec<_>>()
            {
                let one = (*one).clone();
                fields.insert("type".to_owned(), one);
            }
            for (key, value) in fields {
                let name = value.as_str().and_then(|text| text.strip_prefix("#/components/schemas/"));
                if let (Some(name), "$ref") = (name.map(str::to_owned), key.as_str()) {
                    *value = json!(format!("#/$defs/{name}"));
                    names.insert(name);
                } else {
                    names.extend(localise(value));
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| names.extend(localise(item))),
        _ => {}
    }
    names
}

impl ApiTool {
    /// Description for a client.
    pub(super) fn describe(&self) -> Tool {
        let hints = ToolAnnotations::new().read_only(!self.changes).open_world(false);
        let hints = if self.changes { hints.destructive(self.destroys) } else { hints };
        Tool::new(self.name.clone(), self.about.clone(), Arc::new(self.input.clone())).with_annotations(hints)
    }

    /// Path and body of a request with these arguments; an error in words if one is missing or too much.
    pub(super) fn request(
        &self,
        mut arguments: Map<String, Value>,
    ) -> Result<(String, Option<Value>), String> {
        let known = self.input["properties"].as_object().map(|fields| fields.keys().collect::<BTreeSet<_>>());
        let known = known.unwrap_or_default();
        if let Some(name) = arguments.keys().find(|name| !known.contains(name)) {
            return Err(format!("{} has no parameter {name:?}; it has {known:?}", self.name));
        }
        let mut path = String::new();
        let mut rest = self.path.as_str();
        while let Some((before, (name, after))) =
            rest.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
        {
            let value = arguments.remove(name).ok_or_else(|| format!("{} needs {name}", self.name))?;
            path += &format!("{before}{}", percent_encoded(&text(&value)));
            rest = after;
        }
        path += rest;
        for (at, name) in self.query.iter().filter(|name| arguments.contains_key(*name)).enumerate() {
            let value = percent_encoded(&text(&arguments[name]));
            path += &format!("{}{name}={value}", if at == 0 { '?' } else { '&' });
        }
        self.query.iter().for_each(|name| drop(arguments.remove(name)));
        Ok((path, self.has_body.then_some(Value::Object(arguments))))
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Text for a path or a query: everything but unreserved characters is encoded (RFC 3986, 2.3). A name of
/// dots only would be another path.
fn percent_encoded(text: &str) -> String {
    let only_dots = text.bytes().all(|byte| byte == b'.');
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-_~".contains(&byte) || byte == b'.' && !only_dots;
    text.bytes().fold(String::new(), |encoded, byte| match is_plain(byte) {
        true => encoded + char::from(byte).encode_utf8(&mut [0; 4]),
        false => format!("{encoded}%{byte:02X}"),
    })
}

fn snake_case(id: &str) -> String {
    id.chars().fold(String::new(), |name, letter| match letter.is_ascii_uppercase() {
        true => format!("{name}_{}", letter.to_ascii_lowercase()),
        false => format!("{name}{letter}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(allow_changes: bool) -> Vec<ApiTool> {
        let calls: Vec<String> =
            whimbrel_api::documented_calls().map(|(method, path)| format!("{method} {path}")).collect();
        let calls = calls.iter().map(String::as_str).collect();
        tools(&serde_json::to_value(whimbrel_api::openapi()).unwrap(), allow_changes, &calls)
    }

    fn named(name: &str) -> ApiTool {
        all(true).into_iter().find(|tool| tool.name == name).unwrap()
    }

    fn arguments(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn without_leave_no_tool_changes_anything() {
        let names: Vec<String> = all(false).into_iter().map(|tool| tool.name).collect();
        assert!(names.len() > 25 && names.contains(&"console_log".to_owned()), "{names:?}");
        let looks = |name: &str| LOOK_BY_POST.iter().any(|id| snake_case(id) == name);
        assert!(all(false).iter().all(|tool| tool.method == "GET" || looks(&tool.name)));
        assert!(all(true).len() > names.len() + 40);
        assert!(all(true).iter().all(|tool| tool.name != "create_token"), "its answer is a secret");
    }

    #[test]
    fn calls_that_the_caller_may_not_make_are_no_tools() {
        let document = serde_json::to_value(whimbrel_api::openapi()).unwrap();
        let names = tools(&document, true, &BTreeSet::from(["GET /v1/machines", "POST /v1/store/gc"]));
        let names: Vec<&str> = names.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["gc", "machines"]);
    }

    #[test]
    fn every_reference_of_an_input_is_in_it() {
        for tool in all(true) {
            let text = serde_json::to_string(&tool.input).unwrap();
            assert!(!text.contains("#/components"), "{}", tool.name);
            for name in text.split("#/$defs/").skip(1).map(|rest| rest.split('"').next().unwrap()) {
                assert!(tool.input["$defs"][name].is_object(), "{}: {name}", tool.name);
            }
        }
    }

    /// Types of the parameters of a schema, and of the parameters of these; whether each is required.
    fn parameters(schema: &Value, found: &mut Vec<(String, Value, bool)>) {
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, parameter) in schema["properties"].as_object().into_iter().flatten() {
            found.push((name.clone(), parameter["type"].clone(), required.contains(&json!(name))));
        }
        match schema {
            Value::Object(fields) => fields.values().for_each(|value| parameters(value, found)),
            Value::Array(items) => items.iter().for_each(|item| parameters(item, found)),
            _ => {}
        }
    }

    #[test]
    fn a_parameter_has_one_type_and_what_may_be_null_is_not_required() {
        for tool in all(true) {
            let mut found = Vec::new();
            parameters(&Value::Object(tool.input.clone()), &mut found);
            let lists: Vec<_> = found.iter().filter(|(_, kind, _)| kind.is_array()).collect();
            assert!(lists.is_empty(), "{}: {lists:?}", tool.name);
        }
        let mut found = Vec::new();
        parameters(
            &serde_json::to_value(whimbrel_api::openapi()).unwrap()["components"]["schemas"],
            &mut found,
        );
        let null = |kind: &Value| kind.as_array().is_some_and(|kinds| kinds.contains(&json!("null")));
        let optional = found.iter().filter(|(_, kind, required)| null(kind) && !required).count();
        assert!(optional > 20, "{optional}");
    }

    #[test]
    fn arguments_go_where_the_call_has_them_and_do_not_leave_their_place() {
        let tool = named("checkpoint");
        let asked = json!({ "name": "../tokens?x", "tag": "a" });
        let (path, body) = tool.request(arguments(asked)).unwrap();
        assert_eq!(path, "/v1/machines/..%2Ftokens%3Fx/checkpoint");
        assert_eq!(body, Some(json!({ "tag": "a" })));
        let asked = json!({ "name": "..", "bytes": 10 });
        let (path, body) = named("console_log").request(arguments(asked)).unwrap();
        assert_eq!((path.as_str(), body), ("/v1/machines/%2E%2E/console/log?bytes=10", None));
        assert!(tool.request(arguments(json!({}))).unwrap_err().contains("needs name"));
        assert!(tool.request(arguments(json!({ "name": "a", "follow": true }))).is_err());
    }
}
