// nextflow run score.nf --targets T.fasta --candidates C.csv --shards 4
// Each process does one shard into a folder that all share; `-process.executor slurm` runs them on a cluster.
params.out = "scores.csv"
params.shards = 4

process SHARD {
    input:
    val number
    path targets
    path candidates
    val out

    output:
    val number

    script:
    """
    esm-turbo score $targets $candidates --out $out --shard $number/$params.shards --threads $task.cpus
    """
}

process MERGE {
    input:
    val numbers
    val out

    script:
    """
    esm-turbo merge $out
    """
}

workflow {
    out = file(params.out).toAbsolutePath().toString()
    done = SHARD(channel.of(1..params.shards), file(params.targets), file(params.candidates), out)
    MERGE(done.collect(), out)
}
