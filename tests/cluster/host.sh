#!/bin/bash
# Process 1 of a host of the bed (bed.py): makes this mount namespace a machine of its own, starts sshd, then waits.
# The host is switched off when this process dies, or when the bed does (its end of our stdin closes).
#
#   host.sh NAME FOLDER BED SHM_BYTES KEPT...    KEPT: paths that stay visible although they lie below /tmp or /root
set -euo pipefail
name=$1 folder=$2 bed=$3 shm_bytes=$4
shift 4

# Own $2 instead of the machine's $1, with the kept paths that lie below it.
cover() {
    local point=$1 own=$2 kept
    shift 2
    for kept; do
        [[ $kept/ == "$point"/* && $kept != "$point" ]] || continue
        mkdir -p "$own${kept#"$point"}"
        mount --rbind "$kept" "$own${kept#"$point"}"
    done
    mount --rbind "$own" "$point"
}

hostname "$name"
mount -t tmpfs tmpfs "$folder/tmp"
chmod 1777 "$folder/tmp"
cover /root "$folder/root" "$@"
cover /tmp "$folder/tmp" "$@"
mount --bind "$folder/local" "$bed/local"
mount -t tmpfs -o "size=$shm_bytes" tmpfs /dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /dev/pts
[[ -L /dev/ptmx ]] || mount --bind /dev/pts/ptmx /dev/ptmx
mount -t tmpfs tmpfs /run
mkdir /run/sshd
for file in hosts shadow resolv.conf; do
    if [[ -f /etc/$file ]]; then mount --bind "$bed/etc/$file" "/etc/$file"; fi
done

/usr/sbin/sshd -f "$folder/sshd_config" -E "$folder/sshd.log"
exec python -S -c 'import signal, sys # process 1 has to collect orphans, which bash does not while it reads
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()'
