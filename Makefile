# VENV is the folder of the environment, PYTHON the interpreter to make it with, ARGS what pytest or the demo gets.
VENV ?= .venv
export PYTHON ?=
# Without this Ray makes a token for the user's clusters and stores it in ~/.ray.
export RAY_AUTH_MODE = disabled

BIN = '$(VENV)'/bin
HVDRUN = $(BIN)/hvdrun

# The oldest and the newest version that is supported; make smoke PYTHON=... takes one interpreter instead.
SMOKE_VERSIONS = 3.10 3.13

BENCHMARKS = allreduce operations training parameters commits defaults start rounds elastic idle memory traffic simulation ray_train spark_ingest spark_transform spark_fit

.PHONY: help demo docs docs-serve gallery examples mxnet test check pytest test-pygloo test-mxnet smoke benchmarks environment clean

help:
	@echo "make demo          train a classifier of handwritten digits on two workers of a Ray cluster on this machine"
	@echo "make examples      all of examples/, each in less than a minute on two cores"
	@echo "make mxnet         the examples of MXNet, in an environment of its own"
	@echo "make docs          the site of docs/ in build/site, in an environment of its own; its links are checked"
	@echo "make docs-serve    the same in a browser, anew after each change"
	@echo "make gallery       runs the examples, also those of MXNet, and keeps what they show in docs/gallery"
	@echo "make test          ruff, mypy and pytest; the tests of MXNet, and of pygloo where there is a Python 3.10"
	@echo "make check         ruff and mypy; a part of make test"
	@echo "make pytest        pytest; a part of make test"
	@echo "make test-pygloo   the tests of pygloo, on Python 3.10; a part of make test"
	@echo "make test-mxnet    the tests of MXNet, in an environment of its own; a part of make test"
	@echo "make smoke         the tests that need no framework and no cluster, on other versions of Python"
	@echo "make benchmarks    those of docs/performance.md, three quarters of an hour on a machine that should do nothing else"
	@echo "make clean         remove caches and build outputs"
	@echo
	@echo "VENV=/a/folder           the environment, which is made where there is none; .venv by default"
	@echo "PYTHON=/path/to/python   the interpreter to make it with"
	@echo "ARGS='...'               options of the demo or of pytest"

demo: environment
	@$(BIN)/python examples/digits_ray.py $(ARGS)

examples: environment
	$(HVDRUN) -np 2 $(BIN)/python examples/digits.py
	$(HVDRUN) -np 2 $(BIN)/python examples/digits_uneven.py
	$(HVDRUN) -np 2 $(BIN)/python examples/digits_amp.py
	$(HVDRUN) -np 2 --min-np 1 $(BIN)/python examples/elastic_digits.py
	$(HVDRUN) -np 2 $(BIN)/python examples/lightning_digits.py
	$(HVDRUN) -np 2 $(BIN)/python examples/keras_digits.py
	$(HVDRUN) -np 2 $(BIN)/python examples/tensorflow_digits.py
	$(HVDRUN) -np 2 --min-np 1 $(BIN)/python examples/elastic_keras.py
	$(BIN)/python examples/elastic_same_result.py --events 5
	$(BIN)/python examples/elastic_preempted.py
	$(HVDRUN) -np 2 $(BIN)/python examples/transformer_finetune.py
	$(HVDRUN) -np 2 $(BIN)/python examples/resnet_cifar.py
	$(HVDRUN) -np 2 $(BIN)/python examples/gan_ring.py
	$(HVDRUN) -np 4 $(BIN)/python examples/adasum_digits.py
	$(HVDRUN) -np 2 --horovod-alias $(BIN)/python examples/horovod_digits.py
	$(HVDRUN) -np 2 $(BIN)/python examples/synthetic_benchmark.py
	$(HVDRUN) -np 2 $(BIN)/python examples/synthetic_benchmark.py --model mlp --fp16-allreduce
	$(HVDRUN) -np 3 --stall-check-warning-time-seconds 1 $(BIN)/python examples/stalls.py
	$(BIN)/python examples/digits_ray.py
	$(BIN)/python examples/elastic_ray.py --kill
	$(BIN)/python examples/tune_ray.py
	$(BIN)/python examples/search_ray.py
	$(BIN)/python examples/spark_digits.py
	$(BIN)/python examples/elastic_spark.py
	$(BIN)/python examples/spark_regression.py
	$(BIN)/python examples/spark_wide_deep.py
	$(BIN)/python examples/spark_estimator_torch.py
	$(BIN)/python examples/spark_estimator_lightning.py
	$(BIN)/python examples/spark_estimator_keras.py

mxnet:
	@scripts/mxnet '$(VENV)' hvdrun -np 2 python examples/mxnet_mnist_gluon.py
	@scripts/mxnet '$(VENV)' hvdrun -np 2 --horovod-alias python examples/mxnet_mnist_module.py

docs:
	@scripts/site '$(VENV)' build

gallery: environment
	@VENV='$(VENV)' scripts/gallery

docs-serve:
	@scripts/site '$(VENV)' serve

test: check pytest test-pygloo test-mxnet

check: environment
	@echo "ruff check"
	@$(BIN)/ruff check --quiet
	@echo "ruff format"
	@$(BIN)/ruff format --check --quiet
	@echo "mypy"
	@$(BIN)/mypy

pytest: environment
	@echo "pytest"
	@$(BIN)/pytest $(ARGS)

test-pygloo:
	@scripts/pygloo '$(VENV)'

# Its tests on Ray, on Spark and under mpirun find these in the environment of development.
test-mxnet: environment
	@scripts/mxnet '$(VENV)'

smoke:
	@scripts/smoke '$(VENV)' $(SMOKE_VERSIONS)

benchmarks: environment
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

environment:
	@scripts/environment '$(VENV)'

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find collectives executors hvd_cluster tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
