//! The posture as a table: layer, enforced or not, the call that failed, what to grant.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use crate::launcher::posture::{Hello, PostureReport};

/// The table for a terminal.
pub fn table(report: &PostureReport, hello: Option<&Hello>) -> String {
    let mut text = String::new();
    let width = report.layers.iter().map(|layer| layer.layer.len()).max().unwrap_or(0);
    for layer in &report.layers {
        let state = if layer.enforced { "enforced" } else { "MISSING " };
        line(&mut text, format_args!("{:width$}  {state}  {}", layer.layer, layer.detail));
        if let Some(failed) = &layer.failed {
            line(&mut text, format_args!("{:width$}            failed: {failed}", ""));
        }
        if let Some(grant) = &layer.grant {
            line(&mut text, format_args!("{:width$}            grant: {grant}", ""));
        }
    }
    for (name, runtime) in [
        ("python", hello.and_then(|hello| hello.python.as_ref())),
        ("node", hello.and_then(|it| it.node.as_ref())),
    ] {
        match runtime {
            Some(found) => {
                line(&mut text, format_args!("{name:width$}  {} ({})", found.version, found.host_binary))
            }
            None => line(&mut text, format_args!("{name:width$}  not found")),
        }
    }
    for warning in hello.map(|hello| hello.warnings.as_slice()).unwrap_or_default() {
        line(&mut text, format_args!("warning: {warning}"));
    }
    line(&mut text, format_args!("posture: {}", report.posture.name()));
    text
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a String cannot fail");
    text.push('\n');
}
