//! Types of the HTTP API of a host and its OpenAPI document.
