# The probe for a node without Python: nvidia-smi's output as printed, in the same JSON line. POSIX shell, writes no file.
# `interval`, `fields`, `old_fields` and `form` are set by the lines that payload.py puts before this. /bin/sh reads it from the SSH
# channel's stdin; what follows on it (the Python program, then the lease lines) is read and discarded at the end.
#
# Never more than one query at a time: a query starts only when the previous one has ended; until then the line reports
# for how long it has been running. A query that hangs gets one SIGTERM when we exit, never SIGKILL
# (https://github.com/NVIDIA/dcgm-exporter/issues/84).
{
root=${WATTWATCH_NODE_ROOT:-}
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/nvidia/bin:/opt/bin
LC_ALL=C
export PATH LC_ALL
holders=

seconds() {
    read -r up rest <"$root/proc/uptime" && echo "$up" || date +%s
} 2>/dev/null

# Text -> content of a JSON string: control characters removed, \ and " escaped, line ends as \n.
quote() {
    tr -d '\000-\010\013-\037' | tr '\011' ' ' | sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/$/\\n/' | tr -d '\n'
}

# Processes with a GPU context, from stat only: [pid, start in seconds since boot, state, comm, cpu seconds, GPUs].
processes() {
    comma=
    for pair in $holders; do
        pid=${pair%%,*}
        IFS= read -r line <"$root/proc/$pid/stat" || continue
        comm=${line#*\(}
        comm=${comm%)*}
        case $comm in *[\"\\]*) comm='?' ;; esac
        set -- ${line##*) }
        printf '%s[%s,%s,"%s","%s",null,["%s"]]' "$comma" "$pid" "$((${20} / 100))" "$1" "$comm" "${pair#*,}"
        comma=,
    done
} 2>/dev/null

round() {
    at=$(seconds)
    out=$(nvidia-smi --query-gpu="$fields" --format="$form" 2>&1 </dev/null)
    code=$?
    asked=$fields
    # An older driver refuses all of it for one field it does not know: ask for what every driver has.
    case "$code$out" in
        2*"is not a valid field"*)
            asked=$old_fields
            out=$(nvidia-smi --query-gpu="$asked" --format="$form" 2>&1 </dev/null)
            code=$?
            ;;
    esac
    asked=$(printf '%s' "$asked" | sed 's/,/","/g')
    holders=
    listed=
    apps=
    [ "$code" = 0 ] && apps=$(nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader 2>/dev/null </dev/null) && listed=1
    [ -n "$listed" ] && holders=$(printf '%s\n' "$apps" |
        sed -n 's/^ *\([0-9][0-9]*\), *\(GPU-[0-9a-fA-F-]*\).*/\1,\2/p')
    driver=$(sed -n 's/^NVRM version:.* \([0-9][0-9]*\.[0-9.]*\) .*/\1/p' "$root/proc/driver/nvidia/version" 2>/dev/null)
    { read -r load rest <"$root/proc/loadavg"; } 2>/dev/null || load=null
    # Everything is computed first, so that the line is written at once.
    out=$(printf '%s\n' "$out" | quote)
    held=$(processes)
    # An empty list says that nobody is there. A query that fails, or pids of another namespace, say nothing.
    case "$held:$listed:$apps" in
        ::* | :1:*[0-9]*) held=null ;;
        *) held="[$held]" ;;
    esac
    printf '{"v":1,"seq":%s,"t":%s,"w":%s,"gpu":{"src":"shell","t":%s,"rc":%s,"fields":["%s"]%s,"out":"%s"},"proc":%s,"exited":[],"load":[%s,null,null,null,null]}\n' \
        "$1" "$(seconds)" "$(date +%s)" "$at" "$code" "$asked" "${driver:+,\"driver\":\"$driver\"}" "$out" "$held" "$load"
}

ticker() {
    sequence=0
    worker=
    while :; do
        if [ -n "$worker" ] && kill -0 "$worker" 2>/dev/null; then
            now=$(date +%s)
            printf '{"v":1,"seq":%s,"t":%s,"w":%s,"busy":[["nvidia-smi",%s]]}\n' \
                "$sequence" "$(seconds)" "$now" "$((now - since))"
        else
            since=$(date +%s)
            round "$sequence" &
            worker=$!
        fi
        sequence=$((sequence + 1))
        sleep "$interval" &
        wait $!
    done
}

# sshd starts a command as leader of its own process group, so the whole group is ours: terminate all of it.
finish() {
    trap '' HUP TERM INT USR1
    read -r pid comm state parent group rest </proc/$$/stat
    if [ "$group" = "$$" ]; then kill -TERM "-$$"; else kill -TERM "$ticker" "$pacer"; fi
    exit 0
} 2>/dev/null

missed=0
poked=
trap 'poked=1; missed=$((missed + 1)); [ "$missed" -lt 4 ] || finish' USR1
ticker </dev/null &
ticker=$!
# The lease: a counter that goes up every 20 s and is reset by each empty line from the control host; at 4 we exit.
while sleep 20; do kill -USR1 $$ || exit; done </dev/null >/dev/null 2>&1 &
pacer=$!
# Only now: dash loses a signal that reaches a new child before the child has reset the traps it inherited. If stdin
# had ended at once, a child started with this trap would have missed the SIGTERM of `finish` and run on.
trap finish HUP TERM INT
while :; do
    if IFS= read -r line; then
        [ -n "$line" ] || missed=0
    elif [ -n "$poked" ]; then # a signal interrupts `read` in some shells
        poked=
    else
        break
    fi
done
finish
}
