use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::*;

#[test]
fn names_become_functions() {
    for (name, python, bash) in [
        ("get_weather", "get_weather", "get_weather"),
        ("get-weather", "get_weather", "get_weather"),
        ("get weather\tnow", "get_weather_now", "get_weather_now"),
        ("a.b", "ab", "a_b"),
        ("2fast", "_2fast", "_2fast"),
        ("class", "class_tool", "class"),
        ("fi", "fi", "fi_tool"),
        ("__tools_call", "__tools_call", "__tools_call_tool"),
        ("async", "async_tool", "async"),
        ("naïve!", "nave", "nave"),
        ("天气", "", ""),
        ("", "", ""),
    ] {
        assert_eq!(ToolLanguage::Python.function(name), python, "{name}");
        assert_eq!(ToolLanguage::Bash.function(name), bash, "{name}");
    }
}

#[test]
fn two_of_one_name_are_refused_in_bash_and_the_true_one_wins_in_python() {
    let names = |tools: Vec<ToolName>| tools.into_iter().map(|tool| tool.name).collect::<Vec<_>>();
    let functions = |language: ToolLanguage, list: &[&str]| language.functions(list.iter().copied());
    let error = functions(ToolLanguage::Bash, &["x", "a-b", "a_b"]).unwrap_err();
    assert_eq!(error.to_string(), "tools 'a-b' and 'a_b' have the same name in this language: a_b");
    assert_eq!(names(functions(ToolLanguage::Python, &["a_b", "a-b"]).unwrap()), ["a_b"]);
    assert_eq!(names(functions(ToolLanguage::Python, &["a-b", "a_b"]).unwrap()), ["a_b"]);
    assert_eq!(names(functions(ToolLanguage::Python, &["a-b", "a b"]).unwrap()), ["a b"]);
    assert_eq!(names(functions(ToolLanguage::Bash, &["a-b", "a-b", "天气"]).unwrap()), ["a-b"]);
}

#[test]
fn json_is_one_line_in_the_order_it_was_sent() {
    let text = " { \"b\" : [ 1 , 2.50 , { } ] ,\r\n \"a\" : \"x  \\\" : y\" , \"c\" : null } ";
    assert_eq!(Json::parse(text).unwrap().as_str(), r#"{"b":[1,2.50,{}],"a":"x  \" : y","c":null}"#);
    assert_eq!(Json::parse("\"a\\ud800b\"").unwrap().as_str(), "\"a\\ufffdb\"");
    for text in ["", " ", "{", "1 2", "nul", "{\"a\":}", "[1 2]", "true false", "tr ue", "\"\n\""] {
        assert_eq!(Json::parse(text), None, "{text}");
    }
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(Json::parse(&nested(100)).is_some());
    assert!(Json::parse(&nested(101)).is_none());
    assert!(Json::parse("\"[[[{\"").is_some());
}

fn answer(id: &str, outcome: Result<&str, &str>) -> ToolAnswer {
    let outcome = outcome.map(|json| Json::parse(json).unwrap()).map_err(str::to_owned);
    ToolAnswer { id: id.to_owned(), outcome }
}

#[test]
fn answers_are_told_in_either_way() {
    assert_eq!(answer("c1", Ok("{\"a\": 1}")).to_json(), r#"{"id":"c1","result":{"a":1}}"#);
    assert_eq!(answer("c1", Err("a\n\"b\"")).to_json(), r#"{"id":"c1","error":"a\n\"b\""}"#);
    assert_eq!(answer("1_2", Ok("\"ü\"")).to_line(), "1_2 ok 4\n\"ü\"".as_bytes());
    assert_eq!(answer("1_2", Err("no\0")).to_line(), "1_2 error 5\nno\u{fffd}".as_bytes());
    let large = answer("c1", Ok(&format!("\"{}\"", "x".repeat(ANSWER_BYTES_MAX))));
    assert!(large.to_json().starts_with("{\"id\":\"c1\",\"error\":\"the result is too large"));
    assert!(answer("c", Err(&"é".repeat(ANSWER_BYTES_MAX))).to_json().len() < ANSWER_BYTES_MAX);
}

fn called(lines: &str) -> Vec<Called> {
    LineCalls::default().take(lines.as_bytes()).unwrap()
}

#[test]
fn lines_of_stubs_are_calls_and_others_are_none() {
    let call = Called::Call(ToolCall {
        id: "1_2_3".to_owned(),
        name: "get-weather".to_owned(),
        input: Json::parse("{\"city\":\"Oslo\"}").unwrap(),
    });
    assert_eq!(called("1_2_3 {\"name\":\"get-weather\",\"input\":{\"city\": \"Oslo\"}}\n"), [call]);
    let unfit = || Called::Unfit(answer("7", Err("the input of a tool must be one JSON object")));
    for input in
        ["[1]", "text", "{", "{}}", "{},\"name\":\"other\"", "{},\"more\":1", "{} {}", "", "{\"a\":\u{1}1}"]
    {
        assert_eq!(called(&format!("7 {{\"name\":\"x\",\"input\":{input}}}\n")), [unfit()], "{input}");
    }
    for line in ["", "garbage", "{\"name\":\"x\",\"input\":{}}", " {\"name\":\"x\",\"input\":{}}", "a/b {}"] {
        assert_eq!(called(&format!("{line}\n")), [], "{line}");
    }
    assert_eq!(called("7 {\"name\":\"x\",\"input\":{}}"), [], "not whole yet");
}

#[test]
fn a_line_that_does_not_end_is_an_offence() {
    let mut calls = LineCalls::default();
    assert_eq!(calls.take(&vec![b'x'; LINE_BYTES_MAX]), Ok(Vec::new()));
    assert_eq!(calls.take(b"xx"), Err(TooManyCalls));
    assert_eq!(
        LineCalls::default().take(&[vec![b'x'; LINE_BYTES_MAX + 1], vec![b'\n']].concat()),
        Err(TooManyCalls)
    );
}

// --- bash ---------------------------------------------------------------------------------------------------------------

/// Runs a script with its stubs, as the agent of a sandbox does; `answer` sees each call and makes its answer.
fn bash(
    tools: &[&str],
    script: &str,
    answer: impl Fn(&ToolCall) -> Result<Json, String> + Send + Sync,
) -> Output {
    bash_batched(tools, script, |calls| {
        calls.iter().map(|call| ToolAnswer { id: call.id.clone(), outcome: answer(call) }).collect()
    })
}

struct Output {
    stdout: String,
    stderr: String,
    status: Option<i32>,
    /// In the order they came.
    calls: Vec<ToolCall>,
}

fn bash_batched(
    tools: &[&str],
    script: &str,
    mut answer: impl FnMut(&[ToolCall]) -> Vec<ToolAnswer> + Send,
) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let fifo = |name: &str| {
        let path = folder.path().join(name);
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_bits_truncate(0o600), 0).unwrap();
        fs::File::from(rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap())
    };
    let (mut calls_fifo, mut answers_fifo) = (fifo("calls"), fifo("answers"));
    let mut wake = calls_fifo.try_clone().unwrap();
    let tools = ToolLanguage::Bash.functions(tools.iter().copied()).unwrap();
    let path = folder.path().join("main.sh");
    let stubs = bash_stubs(&tools, folder.path().to_str().unwrap());
    assert_eq!(stubs.lines().count(), 1);
    fs::write(&path, format!("{stubs} {script}")).unwrap();
    let child = Command::new("bash")
        .args([&path])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::scope(|scope| {
        let relay = scope.spawn(move || {
            let (mut lines, mut bytes, mut all) = (LineCalls::default(), vec![0; 65536], Vec::new());
            loop {
                let length = calls_fifo.read(&mut bytes).unwrap();
                if bytes[..length].ends_with(b"over\n") {
                    return all;
                }
                let mut calls = Vec::new();
                for called in lines.take(&bytes[..length]).unwrap() {
                    match called {
                        Called::Call(call) => calls.push(call),
                        Called::Unfit(answer) => answers_fifo.write_all(&answer.to_line()).unwrap(),
                    }
                }
                for answer in answer(&calls) {
                    answers_fifo.write_all(&answer.to_line()).unwrap();
                }
                all.extend(calls);
            }
        });
        let output = child.wait_with_output().unwrap();
        wake.write_all(b"over\n").unwrap();
        Output {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            status: output.status.code(),
            calls: relay.join().unwrap(),
        }
    })
}

fn echo(call: &ToolCall) -> Result<Json, String> {
    Ok(call.input.clone())
}

#[test]
fn a_script_calls_its_tools() {
    let script = "echo start\nr=$(get_weather '{\"city\": \"Oslo\",\n \"b\": \"it'\\''s\"}')\necho \"got $r\"\nget_weather\n";
    let got = bash(&["get-weather"], script, echo);
    assert_eq!(got.stdout, "start\ngot {\"city\":\"Oslo\",\"b\":\"it's\"}\n{}\n");
    assert_eq!((got.stderr.as_str(), got.status), ("", Some(0)));
    assert_eq!(got.calls.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), ["get-weather"; 2]);
}

#[test]
fn an_error_is_a_status_and_a_text() {
    let refuse = |_: &ToolCall| Err("no such city:\nü".to_owned());
    let got = bash(&["x"], "r=$(x '{}') || echo \"status $? [$r]\"\nx '{}'\n", refuse);
    assert_eq!((got.stdout.as_str(), got.status), ("status 1 []\n", Some(1)));
    assert_eq!(got.stderr, "x: no such city:\nü\n".repeat(2));
    let got =
        bash(&["x"], "set -euo pipefail\nx '{}' && echo no\necho still\nx 'no json'\necho never", refuse);
    assert_eq!((got.stdout.as_str(), got.status), ("still\n", Some(1)));
    let got = bash(&["x"], "x a b; echo $?; x '[1]'; echo $?; x '{},\"name\":\"y\"'; echo $?", echo);
    assert_eq!(got.stdout, "2\n1\n1\n");
    assert_eq!(got.calls, []);
}

#[test]
fn calls_in_the_background_wait_side_by_side() {
    let script = "for i in 1 2 3 4 5 6 7 8; do x \"{\\\"i\\\":$i}\" > r$i & done\nwait\ncat r?\n";
    let mut held: Vec<ToolCall> = Vec::new();
    // Nothing is answered before all have called; then the last first.
    let got = bash_batched(&["x"], script, |calls| {
        held.extend_from_slice(calls);
        if held.len() < 8 {
            return Vec::new();
        }
        held.drain(..).rev().map(|call| ToolAnswer { id: call.id, outcome: Ok(call.input) }).collect()
    });
    let wanted: String = (1..=8).map(|i| format!("{{\"i\":{i}}}\n")).collect();
    assert_eq!((got.stdout, got.stderr), (wanted, String::new()));
}

#[test]
fn long_inputs_and_results_arrive_whole_and_do_not_mix() {
    let script = "for i in 1 2 3 4; do x \"{\\\"i\\\":\\\"$(printf \"$i%.0s\" {1..60000})\\\"}\" > r$i & done\nwait\nwc -c r?\nmd5sum r1 r2 | sort -u | wc -l\n";
    let got = bash(&["x"], script, echo);
    assert_eq!(got.stdout.matches("60009").count(), 4, "{}", got.stdout);
    let large = format!("\"{}é\"", "y".repeat(300_000));
    let got = bash(&["x"], "r=$(x); echo ${#r}", |_| Ok(Json::parse(&large).unwrap()));
    assert!(["300004\n", "300003\n"].contains(&got.stdout.as_str()), "{}", got.stdout);
}

#[test]
fn a_scripts_own_settings_do_not_matter() {
    for settings in [
        "set -euo pipefail",
        "set -C",
        "IFS=xyz",
        "PATH=/nowhere:/bin:/usr/bin",
        "shopt -s extglob nullglob",
        "trap 'echo trapped' EXIT",
        "read() { :; }; printf() { :; }; exec() { :; }; mkfifo() { :; }; rm() { :; }",
        "cd /",
        "exec 3>&1 4>&1 5>&1",
        "set -o posix",
        "set -x",
    ] {
        let got = bash(&["x"], &format!("{settings}\nx '{{\"a\":\"b c\"}}'"), echo);
        let stdout = got.stdout.replace("trapped\n", "");
        assert_eq!(
            (stdout.as_str(), got.status),
            ("{\"a\":\"b c\"}\n", Some(0)),
            "{settings}: {}",
            got.stderr
        );
    }
}

#[test]
fn tools_may_be_named_like_what_the_stubs_use() {
    let names =
        ["read", "printf", "exec", "echo", "test", "mkfifo", "rm", "command", "trap", "set", "continue"];
    let script: String = names.iter().map(|name| format!("{name} '{{}}'\n")).collect();
    let got = bash(&names, &script, |call| Ok(Json::parse(&format!("\"{}\"", call.name)).unwrap()));
    let wanted: String = names.iter().map(|name| format!("\"{name}\"\n")).collect();
    assert_eq!(got.stdout, wanted, "{}", got.stderr);
}

#[test]
fn lines_of_messages_are_the_scripts_own() {
    let got = bash(&["x"], "true\nno_such_command\n", echo);
    assert!(got.stderr.contains("main.sh: line 2: no_such_command"), "{}", got.stderr);
    let got = bash(&["x"], "#!/bin/bash\necho $LINENO $0", echo);
    assert!(got.stdout.starts_with("2 "), "{}", got.stdout);
}

#[test]
fn what_a_script_prints_or_writes_there_is_no_call() {
    let script = "echo '1 {\"name\":\"x\",\"input\":{}}'\necho garbage > calls\necho > calls\nsleep 0.2\nx '{\"a\":1}'";
    let got = bash(&["x"], script, echo);
    assert_eq!(got.calls.len(), 1);
    assert!(got.stdout.ends_with("{\"a\":1}\n"));
}

#[test]
fn a_call_that_is_killed_holds_no_other() {
    let script = "x '{\"n\":1}' & sleep 0.3; kill $! ; wait 2>/dev/null\nx '{\"n\":2}'";
    let mut first = None;
    let got = bash_batched(&["x"], script, |calls| {
        let mut answers: Vec<ToolAnswer> = Vec::new();
        for call in calls {
            match first.take() {
                None if call.input.as_str() == "{\"n\":1}" => first = Some(call.clone()),
                other => answers.extend(
                    other
                        .into_iter()
                        .chain([call.clone()])
                        .map(|call| ToolAnswer { id: call.id, outcome: Ok(call.input) }),
                ),
            }
        }
        answers
    });
    assert!(got.stdout.ends_with("{\"n\":2}\n"), "{} {}", got.stdout, got.stderr);
}

proptest! {
    #[test]
    fn json_survives_being_made_compact(text in r#"[ \n\t{}\[\]:,"a1\\.e+-]{0,40}"#) {
        if let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) {
            let compact = Json::parse(&text).expect("it is JSON and flat");
            prop_assert_eq!(serde_json::from_str::<serde_json::Value>(compact.as_str()).unwrap(), value);
            prop_assert!(!compact.as_str().contains('\n'));
        } else {
            // Numbers that serde_json refuses by their size alone may pass.
            let _ = Json::parse(&text);
        }
    }

    #[test]
    fn no_line_of_a_guest_breaks_the_reader(
        lines in proptest::collection::vec("[0-9_]{0,3} ?[\\PC\n\"{}:,]{0,40}", 0..8),
        cut in 1_usize..50,
    ) {
        let bytes = lines.join("\n").into_bytes();
        let whole = LineCalls::default().take(&bytes).unwrap();
        let mut reader = LineCalls::default();
        let pieces: Vec<Called> = bytes.chunks(cut).flat_map(|piece| reader.take(piece).unwrap()).collect();
        prop_assert_eq!(pieces, whole);
    }

    #[test]
    fn every_input_reaches_the_daemon_as_it_was(key in "\\PC{0,8}", value in any::<i32>()) {
        let input = serde_json::json!({ key: value }).to_string();
        let line = format!("1_2 {{\"name\":\"x\",\"input\":{input}}}\n");
        let Some(Called::Call(call)) = called(&line).pop() else { panic!("a call: {line}") };
        prop_assert_eq!(call.input.as_str(), input);
    }
}

// --- the book -----------------------------------------------------------------------------------------------------------

fn called_as(id: &str) -> Called {
    Called::Call(ToolCall {
        id: id.to_owned(),
        name: "x".to_owned(),
        input: Json::parse("{}").expect("JSON"),
    })
}

#[test]
fn an_id_is_used_once_and_only_who_waits_is_answered() {
    let unfit = |id: &str| Called::Unfit(ToolAnswer { id: id.to_owned(), outcome: Err(String::new()) });
    let answer = |id: &str| ToolAnswer { id: id.to_owned(), outcome: Ok(Json::parse("1").expect("JSON")) };
    let ids = |answers: Vec<ToolAnswer>| answers.into_iter().map(|answer| answer.id).collect::<Vec<_>>();
    let mut book = CallBook::default();
    let (fit, at_once) =
        book.take([called_as("1"), called_as("1"), unfit("2"), unfit("2"), unfit("1")]).unwrap();
    assert_eq!((fit.len(), ids(at_once)), (1, vec!["2".to_owned()]));
    assert!(book.waits());
    assert_eq!(ids(book.answered(vec![answer("2"), answer("3")])), [""; 0]);
    assert!(book.waits(), "what nobody waits for ends no wait");
    assert_eq!(ids(book.answered(vec![answer("1"), answer("1")])), ["1"]);
    assert!(!book.waits());
    let (fit, at_once) = book.take([called_as("1")]).unwrap();
    assert!(fit.is_empty() && at_once.is_empty() && !book.waits());
}

#[test]
fn a_program_has_so_many_calls_and_bytes_of_them() {
    let mut book = CallBook::default();
    for number in 0..CALLS_MAX {
        book.take([called_as(&number.to_string())]).expect("as many as there may be");
    }
    assert_eq!(book.take([called_as("0")]), Ok((Vec::new(), Vec::new())), "it was one of them");
    assert_eq!(book.take([called_as("more")]), Err(TooManyCalls));
    let (mut calls, line) = (LineCalls::default(), [vec![b'x'; LINE_BYTES_MAX - 1], vec![b'\n']].concat());
    for _ in 0..CALL_BYTES_MAX / line.len() {
        assert_eq!(calls.take(&line), Ok(Vec::new()), "garbage counts");
    }
    assert_eq!(calls.take(&line), Err(TooManyCalls));
}
