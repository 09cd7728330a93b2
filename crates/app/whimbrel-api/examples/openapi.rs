//! Prints the OpenAPI document: `cargo run -p whimbrel-api --example openapi > docs/openapi.json`.

fn main() {
    print!("{}", whimbrel_api::openapi_json());
}
