# What a person or a machine does with this repository. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help setup setup-program alerts build deb demo demo-cluster test test-deb test-kills test-long test-overload test-upgrade model fuzz fmt lint audit advisories clean

help: ## This list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: ## Install what building and testing need and is missing (apt; asks sudo when not root)
	@scripts/setup.sh

# What the program needs, without the tools of the tests.
setup-program:
	@scripts/setup.sh program

build: setup-program ## The programs, optimised: target/release/weir, and weir-bench beside it
	cargo build --release --locked -p weir -p weir-bench

# A tool in a cache, like those of the tests (scripts/setup.sh). PROFILE=dev packages the program of the tests.
PROFILE ?= release
TOOLS = $${WEIR_TOOLS:-$$HOME/.cache/weir-tools}/bin
CARGO_DEB = $(TOOLS)/cargo-deb
PROMTOOL = PATH="$$PATH:$(TOOLS)" promtool
deb: setup-program ## A Debian package: target/debian/weir_VERSION_ARCH.deb (installs cargo-deb if missing)
	scripts/setup.sh deb
	cargo build --profile $(PROFILE) --locked $(if $(filter dev,$(PROFILE)),--workspace --bin weir,-p weir)
	rm -rf target/package
	target/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))/weir package-files target/package
	$(CARGO_DEB) -q -p weir --no-build --no-strip --profile $(PROFILE) --locked $(if $(filter dev,$(PROFILE)),--fast)

test-deb: ## The package is built, installed on a copy of this machine's system that is thrown away, used, and removed
	$(MAKE) deb PROFILE=dev
	scripts/test-deb.sh target/debian/weir_*.deb

alerts: ## The alert rules for Prometheus are checked and tested by promtool (installs it if missing)
	@scripts/setup.sh alerts
	$(PROMTOOL) check rules docs/monitoring/weir-alerts.yml
	$(PROMTOOL) test rules docs/monitoring/weir-alerts-test.yml

demo-cluster: build ## Three machines as network namespaces: detectors write while a machine, a coordinator and a member of etcd are killed (root)
	scripts/setup.sh cluster
	python3 scripts/demo_cluster.py target/release/weir

demo: build ## Detectors write to six targets, one dies; a volume streams home, its mover dies; all is verified
	target/release/weir-bench demo

# Clippy first: it finds in one minute what the tests would need ten for. One profile for all tests, so that
# everything is compiled once. scripts/run_tests.py runs several test programs at a time and ends with the summary of all.
test: export WEIR_TEST_ALL = 1
test: setup lint ## Format, lints and all tests; none is left out
	cargo test --locked --workspace --doc
	scripts/run_tests.py

# Seeds of the long run; those of `make test` are others. Applications rest so long that a run is ten minutes of simulated time, and
# meets some 150 faults. A tenth as many runs have a home, snapshots, locks, a tree of directories and a trash, too, and as many a
# volume that follows a home; all of these have volumes with limits.
SEEDS ?= 10000
SIMULATE = target/release/weir-sim --jobs $$(nproc) --pause-ms 28000 --marks yes
LONG = cargo test --release --locked -p
test-long: ## Hours: SEEDS=10000 simulated clusters for ten minutes each, fsx 20 × 1 M, 10,000 sequences beside a local file system, sqlite from four mounts, 500 histories of four mounts, 30,000 of a volume and its home, HDF5 followed for ten minutes, power cuts, kills, 10,000 volumes
	cargo build --release --locked -p weir-sim
	$(SIMULATE) --seed 100000 --runs $(SEEDS)
	$(SIMULATE) --seed 200000 --runs $$(($(SEEDS) / 10)) --home yes --snapshots yes --locks yes --tree yes --trash yes --limits yes
	$(SIMULATE) --seed 300000 --runs $$(($(SEEDS) / 10)) --replica yes --limits yes
	WEIR_DIFFERENTIAL=0..10000 $(LONG) weir --test differential
	$(LONG) weir --test posix -- --ignored --test-threads 1
	$(LONG) weir --test locks -- --ignored
	WEIR_POWER_CUTS=100 $(LONG) weir --test power
	WEIR_KILL_ROUNDS=100 $(LONG) weir --test kill
	$(LONG) weir --test crash_points -- --ignored --nocapture
	$(LONG) weir --test coherence -- --ignored --nocapture --test-threads 1
	$(LONG) weir --test hostile -- --ignored --nocapture
	$(LONG) weir-store --test images -- --ignored --nocapture
	$(LONG) weir-meta --test service -- --ignored
	$(LONG) weir --test volumes -- --ignored --nocapture

KILLS ?= 50
test-kills: build ## KILLS=50 kills of metadata leaders, coordinators and members of etcd while two mounts' histories, git, sqlite and HDF5 are checked
	scripts/setup.sh cluster
	python3 scripts/kills.py target/release/weir --kills $(KILLS)

test-overload: build ## More work than the machine can do, beside busy loops: nothing fails, no live target leaves its groups (root)
	python3 scripts/overload.py target/release/weir

test-upgrade: setup ## A cluster of the commit in scripts/upgrade-from is upgraded role after role, while detectors write
	older=$$(scripts/upgrade-from.sh) && WEIR_UPGRADE_FROM=$$older \
	  cargo test --locked --workspace --test upgrade -- --ignored --nocapture

model: ## Minutes, gigabytes: the protocols of stripes and journal groups searched state by state, in larger configurations than `make test` does
	cargo test --locked --release -p weir-store --test protocol -- --ignored --nocapture
	cargo test --locked --release -p weir-meta --test journal --test early -- --ignored --nocapture

# Per target. A finding is kept in fuzz/artifacts and printed with the command that repeats it.
SECONDS ?= 60
FUZZ_TARGETS ?= $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
fuzz: ## libFuzzer on every decoder of wire, disk and configuration, SECONDS=60 each (nightly; installs cargo-fuzz if missing)
	@command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
	cd fuzz && cargo +nightly run --release --bin seeds
	cd fuzz && set -e; for target in $(FUZZ_TARGETS); do \
	  cargo +nightly fuzz run $$target -- -max_total_time=$(SECONDS) -max_len=8192 -rss_limit_mb=1024 -print_final_stats=1; done

fmt: ## Format the sources
	cargo fmt --all

lint: ## Format check, words (scripts/prose.toml), sizes (scripts/sizes.toml) and clippy, warnings denied
	cargo fmt --all --check
	python3 scripts/prose.py
	python3 scripts/sizes.py --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

audit: ## Licences, sources and duplicates among the dependencies (installs cargo-deny if missing)
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --workspace check bans licenses sources

advisories: ## Known vulnerabilities of the dependencies (fetches the advisory database)
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --workspace check advisories

clean: ## Remove everything that was built
	cargo clean
	rm -rf .venv
