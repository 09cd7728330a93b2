//! The document that is checked in is the one the code makes, and hangs together.

use std::{collections::BTreeSet, fs, path::Path};

#[test]
fn the_document_in_docs_is_the_one_the_code_makes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/openapi.json");
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let advice = "write it anew: cargo run -p whimbrel-api --example openapi > docs/openapi.json";
    assert!(kept == whimbrel_api::openapi_json(), "docs/openapi.json is out of date; {advice}");
}

#[test]
fn every_reference_points_at_a_schema_that_is_there() {
    let document: serde_json::Value = serde_json::from_str(&whimbrel_api::openapi_json()).unwrap();
    let mut wanted = BTreeSet::new();
    collect_references(&document, &mut wanted);
    assert!(wanted.len() > 20, "found only {wanted:?}");
    for reference in wanted {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference} points nowhere");
    }
}

#[test]
fn no_operation_is_named_twice() {
    let document: serde_json::Value = serde_json::from_str(&whimbrel_api::openapi_json()).unwrap();
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{method} {path}: {id} is taken");
        }
    }
    assert!(ids.len() > 30, "found only {ids:?}");
}

fn collect_references(value: &serde_json::Value, into: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(map) => map.iter().for_each(|(key, value)| match value.as_str() {
            Some(reference) if key == "$ref" => drop(into.insert(reference.to_owned())),
            _ => collect_references(value, into),
        }),
        serde_json::Value::Array(list) => list.iter().for_each(|value| collect_references(value, into)),
        _ => {}
    }
}

#[test]
fn every_call_has_its_errors_and_every_body_an_example() {
    let document: serde_json::Value = serde_json::from_str(&whimbrel_api::openapi_json()).unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            for status in ["401", "403", "429", "500", "default"] {
                assert!(responses.contains_key(status), "{method} {path} never answers {status}");
            }
            assert!(!path.contains('{') || responses.contains_key("404"), "{method} {path}");
            let mut bodies = BTreeSet::new();
            collect_references(&operation["requestBody"], &mut bodies);
            collect_references(&operation["responses"], &mut bodies);
            for body in bodies.iter().filter(|reference| reference.contains("/schemas/")) {
                let schema = document.pointer(body.strip_prefix('#').unwrap()).unwrap();
                assert!(!schema["examples"][0].is_null(), "{method} {path}: {body} has no example");
            }
        }
    }
}
