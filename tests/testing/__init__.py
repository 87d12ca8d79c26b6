"""What tests of several files share. A test file imports from here, and never from another test file.

* ``tiny_models``: the greedy tokens of transformers, for the models that the fixture ``tiny_model`` makes.
* ``tiny_engine``: an engine over a tiny model, requests for it, and their tokens.
* ``windows``: requests that are longer than a window, and steps that poison what is given back.
* ``constant_engine``: an engine without a model, for tests of scheduling.
* ``manual_clock``, ``manual_disk``: a clock and a disk cache that move when a test says so.
* ``linear_layers``: rows, threads and sums of linear layers on the CPU.
* ``machines``: the processors of several kinds of machines, and files that describe them as Linux does.
* ``until``: waiting for a condition that nothing announces.
* ``grpc_servers``: bare gRPC servers for scripted servicers.
* ``rpc_errors``: the error of a gRPC call that must fail, and errors for scripted calls.
* ``memory_index``: a prefix index without a server.
* ``api_keys``: files with new keys of tenants.
* ``transport_pair``: two workers that push and pull blocks over any transport.
* ``decodes``: calls of a worker as a router makes them, and the worker's end of a decode.
* ``fake_worker``: workers that answer from a script, and a router in front of them.
* ``valid_requests``: requests as if they had been validated.
* ``router_parts``: memberships, background tasks and charges for parts of a router.
* ``intruder``: a process that says what a worker says, to get its prompts.
* ``fake_generation``: a router that answers from a script, for the clients.
* ``live_run``, ``live_load``, ``prometheus``: a stack under load that a real Prometheus watches.
* ``repository``: the root of the repository, and the folders of the package.
* ``promql``: the expressions of dashboards, and the series that they refer to.
* ``certificates``: files of certificates for servers with TLS.
* ``stacks``: connections to a stack of real processes, which ``start_stack`` starts, and its metrics.
* ``forked``, ``forked_ranks``: processes that are forked from one that has imported torch.
* ``commands``: commands that run to their ends.
* ``processes``: ``quire serve``, workers that a script changes, ranks, and whether processes run.
"""
