# Each target sets up what it needs first (scripts/setup.sh; quick when nothing is missing). README.md has the tour.
# Scripts take what they need of their surroundings themselves.
surrounded := . scripts/environment.sh &&

.PHONY: serve test build bench soak faults files test-vm test-vm-quick suites setup clean-runtime

serve: ## build, set up, run the daemon in the foreground and show a first execution
	@bash scripts/serve.sh

test: ## formatting, lints, all our tests, then the real binary against the shared suites
	@bash scripts/test.sh

build: setup ## leaves target/release/caisson
	@$(surrounded) cargo build --release --locked && chmod a+rx target/release/caisson

suites: build ## only the shared suites, against the real binary
	@$(surrounded) /usr/bin/env python3 tests/suites.py

test-vm: build ## isolation tests and attack corpus under other kernels and postures (long)
	@bash scripts/setup.sh vm
	@$(surrounded) /usr/bin/env python3 tests/vm.py

test-vm-quick: build ## the part of test-vm that fits into ten minutes
	@bash scripts/setup.sh vm
	@$(surrounded) /usr/bin/env python3 tests/vm.py --quick

soak: build ## 10,000 one-offs and 200 sessions with random kills; figures return to the start (SOAK_ARGS="--one-offs 300 --sessions 20" is quick)
	@$(surrounded) /usr/bin/env python3 -u tests/soak.py $(SOAK_ARGS)

faults: build ## guests that flood, bomb, forge and die; daemon, launcher and zygotes killed under load; a neighbour watches
	@$(surrounded) /usr/bin/env python3 -u tests/faults.py $(FAULTS_ARGS)

files: build ## the file planes against guests that race, link and swap; large transfers; helpers that die
	@$(surrounded) /usr/bin/env python3 -u tests/files.py $(FILES_ARGS)

bench: build ## the rows of docs/benchmarks.md, side by side with their peers, as a table of ratios
	@bash scripts/setup.sh bench
	@$(surrounded) /usr/bin/env python3 benches/bench.py $(BENCH_ARGS)

setup: ## only the set-up
	@bash scripts/setup.sh

clean-runtime: ## forget the Python environment and its caches
	@rm -rf target/runtime
