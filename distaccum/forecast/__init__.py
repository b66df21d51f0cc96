"""What a job will hold, send and take, before anything is started: pure arithmetic, no torch.

**Messages** cost ``alpha + B / beta`` seconds: a latency, and B bytes over a bandwidth (R. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", 1994).

**Collectives** of B bytes among N ranks (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", 2005; P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009)::

    all-reduce, ring             2 (N - 1) (alpha + B / (N beta))
    all-reduce, binary tree      2 ceil(log2 N) (alpha + B / beta)     up to the root and down again; the faster one
    reduce-scatter, all-gather     (N - 1) (alpha + B / (N beta))      rings; a broadcast and a reduction likewise

A ring waits at each step for its slowest link: that between nodes as soon as there are two of them. Rings that leave a
node side by side share its link.

**Memory** of P parameters on one of N ranks (S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, table 1): parameters, gradients and optimizer state, each over N from the ZeRO stage
on that shards it. Activations are not modelled, nor are blocks while they are gathered.

**A micro-step** of t seconds is a forward of t/3 and a backward of 2t/3, spread over the parameters by their number. A
micro-step of fewer samples takes as much less.

**A window** is A micro-steps, one small all-reduce (the count), and the optimizer's update, or a rank's share of it. At
the boundary the reduction goes bucket by bucket, while the backward is still busy with what is left::

    finish[i] = max(ready[i], finish[i-1]) + cost[i]

What is left of it when the backward has ended is exposed. Parameters in shards are gathered block by block, each while
the block before it computes, over the same link. DeepSpeed, as it is configured here, reduces after the backward.

**Efficiency** on N ranks is T(1) / (N T(N)), at the same global batch: strong scaling.

What the model leaves out: stragglers, contention with other jobs and between a node's own rings and PCIe, collectives
that work in several layers, small micro-batches that use a GPU less well, and loading the data.
"""
