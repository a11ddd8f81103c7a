# Everything runs in .venv, which the first target that needs it makes. Variables:
#   TORCH=auto|cpu|cuda|rocm|system  which torch the environment gets (README, "Choosing torch")
#   PYTHON=/path/to/python           which Python makes the environment (the first of 3.11 or newer, by default)
#   ARGS='-p depth 6'                what papermill is given
TORCH ?= auto
PYTHON ?=
ARGS ?=
BIN := .venv/bin
, := ,# $(call) splits its arguments at commas
install = @python="$$(PYTHON='$(PYTHON)' sh exec/env/find_python.sh)" && \
	"$$python" exec/env/install.py --torch '$(TORCH)' --extras '$(1)'

.PHONY: help pretrain test lint types lab notebooks

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

pretrain:  ## pre-train a GPT through notebooks/07_pretrain.ipynb; ARGS='-p depth 6' goes to papermill
	$(call install,)
	@$(BIN)/nanolearn data fetch embedded
	@mkdir -p out
	@$(BIN)/papermill --log-output --no-progress-bar notebooks/07_pretrain.ipynb out/07_pretrain.ipynb $(ARGS)
	@$(BIN)/python exec/where.py out/07_pretrain.ipynb

test:  ## check style and types, then run the fast tests and the slow ones
	$(call install,dev$(,)trackers)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -m "not slow"
	@$(BIN)/python -m pytest -q -m slow

lint:  ## check style, formatting and the direction of imports
	$(call install,dev$(,)trackers)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

types:  ## check type hints
	$(call install,dev$(,)trackers)
	@$(BIN)/mypy

lab:  ## open JupyterLab on this environment
	$(call install,)
	@$(BIN)/jupyter lab notebooks

notebooks:  ## write notebooks/*.ipynb from book/chapters/*.md
	$(call install,dev$(,)trackers)
	@for chapter in book/chapters/[0-9]*.md; do \
		notebook="notebooks/$$(basename "$$chapter" .md).ipynb"; \
		$(BIN)/jupytext --quiet --to ipynb --output "$$notebook" "$$chapter" && $(BIN)/nbstripout "$$notebook" || exit 1; \
	done
