__tools_turn=
builtin command mkfifo -m 600 "$__tools_folder/turn"
builtin exec {__tools_turn}<>"$__tools_folder/turn"
builtin printf . >&"$__tools_turn"

# Gives each answer to who waits for it.
__tools_hand_out() {
  local LC_ALL=C IFS=' ' id verdict length text
  while builtin read -r id verdict length; do
    builtin read -r -N "$length" text || [[ $length == 0 ]] || builtin return 0
    [[ $id =~ ^[0-9_]+$ && -p $__tools_folder/$id ]] || builtin continue
    # It may have gone, and this must not wait for it.
    { builtin printf '%s %s\n%s' "$verdict" "$length" "$text" >"$__tools_folder/$id"; } &
  done <"$__tools_folder/answers"
}
( builtin trap - EXIT ERR DEBUG; builtin set +eux; __tools_hand_out & ) </dev/null >/dev/null 2>&1

# A tool's name as JSON, and the one argument of its function.
__tools_call() {
  local -
  { builtin set +eux; } 2>/dev/null
  local LC_ALL=C IFS=' ' id=${BASHPID}_${RANDOM}_${RANDOM} input='{}' answers='' token='' verdict='' length='' text=''
  if (( $# > 2 )); then
    builtin printf '%s: takes one argument, a JSON object\n' "${1:1:-1}" >&2
    builtin return 2
  fi
  [[ -z ${2-} ]] || input=${2//$'\n'/ }
  builtin command mkfifo -m 600 "$__tools_folder/$id" || builtin return 126
  builtin exec {answers}<>"$__tools_folder/$id" || builtin return 126
  builtin read -r -N 1 -u "$__tools_turn" token || builtin return 126
  builtin printf '%s {"name":%s,"input":%s}\n' "$id" "$1" "$input" >"$__tools_folder/calls" || builtin :
  builtin printf . >&"$__tools_turn" || builtin return 126
  builtin read -r -u "$answers" verdict length || builtin :
  [[ ${length:-0} == 0 ]] || builtin read -r -N "$length" -u "$answers" text || builtin :
  builtin exec {answers}>&-
  builtin command rm -f -- "$__tools_folder/$id" || builtin :
  if [[ $verdict == ok ]]; then
    builtin printf '%s\n' "$text"
    builtin return
  fi
  builtin printf '%s: %s\n' "${1:1:-1}" "$text" >&2
  builtin return 1
}

