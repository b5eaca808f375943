//! Cells whose outputs are sent while they run.

use serde_json::{Value, json};

use super::*;

const RUN: &str = "/v2/code/execute";

fn cell(code: &str) -> String {
    json!({ "language": "python", "code": code }).to_string()
}

async fn stream(code: &str, accept: &str) -> Reply {
    post(RUN, &cell(code)).header("accept", accept).to(&daemon(&[])).await
}

fn lines(reply: &Reply) -> Vec<Value> {
    reply.text.lines().map(|line| serde_json::from_str(line).expect("each line is one event")).collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event"].as_str().expect("a name")).collect()
}

#[tokio::test]
async fn lines_come_in_order_and_the_whole_answer_is_the_last() {
    let reply = stream("pieces", "application/x-ndjson").await;
    assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, Some("application/x-ndjson")));
    let events = lines(&reply);
    assert_eq!(names(&events), ["output", "output", "update", "clear", "done"]);
    assert_eq!(events[0]["output"], json!({ "output_type": "stream", "name": "stdout", "text": "1\n" }));
    assert_eq!((&events[1]["display_id"], &events[2]["display_id"]), (&json!("d"), &json!("d")));
    assert_eq!(events[3]["wait"], true);
    let plain = post(RUN, &cell("pieces")).to(&daemon(&[])).await.json();
    let mut last = events[4].clone();
    last.as_object_mut().expect("an object").remove("event");
    assert_eq!(last, plain, "the last event is the answer that would have come without a stream");
}

#[tokio::test]
async fn an_event_stream_has_names_and_one_line_of_data_each() {
    let reply = stream("pieces", "text/html, text/event-stream;q=0.9").await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    let events: Vec<_> = reply.text.split_terminator("\n\n").collect();
    assert_eq!(events.len(), 5);
    for event in events {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(Some(name), data["event"].as_str().map(|name| format!("event: {name}")).as_deref());
    }
}

#[tokio::test]
async fn what_was_refused_at_once_is_an_ordinary_refusal() {
    let reply = stream("many", "text/event-stream").await;
    assert_eq!((reply.status.as_u16(), reply.header("content-type")), (429, Some("application/json")));
    let invalid = post(RUN, r#"{"language": "ruby", "code": "1"}"#).header("accept", "text/event-stream");
    assert_eq!(invalid.to(&daemon(&[])).await.status, 422);
    let any = post(RUN, &cell("print(1)")).header("accept", "*/*").to(&daemon(&[])).await;
    assert_eq!(any.header("content-type"), Some("application/json"), "only by name");
}

#[tokio::test]
async fn silence_is_broken_and_a_late_refusal_comes_in_the_stream() {
    let events = lines(&stream("sleep 3", "application/x-ndjson").await);
    assert_eq!((names(&events)[0], names(&events)[1]), ("ping", "ping"));
    assert_eq!(names(&events).last(), Some(&"done"));
    let silent = stream("sleep 3", "text/event-stream").await;
    assert!(silent.text.starts_with(": keep-alive\n\n"), "{}", silent.text);
    let events = lines(&stream("late refusal", "application/x-ndjson").await);
    let last = events.last().expect("an end");
    assert_eq!((names(&events)[0], &last["event"]), ("ping", &json!("refused")));
    assert_eq!((&last["status"], &last["success"]), (&json!(503), &json!(false)));
}

#[tokio::test]
async fn an_engine_that_breaks_in_a_stream_ends_it_with_an_answer() {
    let events = lines(&stream("panic", "application/x-ndjson").await);
    assert_eq!(names(&events), ["done"]);
    assert_eq!(events[0]["data"]["outputs"][0]["ename"], "ProcessError");
}

#[tokio::test]
async fn who_hangs_up_drops_the_run() {
    let fake = Fake::default();
    let app = daemon_with(&[], fake.clone());
    let request = Request::builder().method(Method::POST).uri(RUN).header("host", "127.0.0.1:18091");
    let request = request.header("content-type", "application/json").header("accept", "application/x-ndjson");
    let response = app.clone().oneshot(request.body(Body::from(cell("forever"))).unwrap()).await.unwrap();
    let mut body = response.into_body();
    body.frame().await.expect("a first piece").expect("readable");
    assert!(!fake.is_dropped());
    drop(body);
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if fake.is_dropped() {
            return;
        }
    }
    panic!("the engine's future goes with the body");
}
