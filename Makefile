# The commands that matter. Everything else is in `cargo xtask` (see CONTRIBUTING.md).

# A fresh rustup is not on the PATH of a shell that was open before.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help build test demo bench doc deb static clean bootstrap

help:
	@echo 'make build    the whimbrel binary, target/release/whimbrel'
	@echo 'make test     everything that must hold: house rules, fmt, clippy, doc, all tests (root)'
	@echo 'make demo     two hosts on this machine, a guest, and what Whimbrel does with it (root)'
	@echo 'make bench    every experiment against its peers, short; one: cargo xtask bench NAME (root)'
	@echo 'make doc      the API documentation, target/doc'
	@echo 'make deb      the Debian package, target/debian/whimbrel_*.deb; scripts/reproducible builds it twice'
	@echo 'make static   programs without libraries, target/static: client verbs, sessions, guests (root)'
	@echo 'make clean    remove target'

bootstrap:
	@scripts/bootstrap

build:
	@echo '==> build'
	@cargo build --release --locked -p whimbrel
	@echo 'target/release/whimbrel'

test: bootstrap
	@cargo xtask check

# Both packages in one build: apart they would have other features, and some crates would be compiled twice.
demo: bootstrap
	@echo '==> build'
	@cargo build --profile demo --locked -p whimbrel -p whimbrel-e2e --bin whimbrel --bin demo
	@echo '==> demo'
	@target/demo/demo

bench:
	@scripts/bootstrap bench
	@cargo xtask bench run --quick

doc:
	@echo '==> doc'
	@cargo doc --workspace --no-deps --locked

deb:
	@scripts/deb

static:
	@scripts/static

clean:
	@cargo clean
