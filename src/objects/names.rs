//! Names that uploads bring along. A safe relative path is kept as it was sent, because clients match answers by it;
//! anything else becomes one, so that it can be laid into a workspace without a second look.
#![forbid(unsafe_code)]

/// Most characters of a name, its folders included.
pub const NAME_CHARS_MAX: usize = 256;
/// Most segments of a name.
pub const NAME_DEPTH_MAX: usize = 10;
/// Longest segment, in bytes: what file systems take.
const SEGMENT_BYTES_MAX: usize = 255;
/// Bytes of an ending that is kept when a segment is cut.
const ENDING_BYTES_MAX: usize = 32;
/// The name of what has none.
const NAMELESS: &str = "upload";

/// The name under which an upload called `raw` is kept.
pub fn of_upload(raw: &str) -> String {
    let name: String = raw
        .chars()
        .map(|character| match character {
            '\\' => '/',
            _ if character.is_control() => '_',
            _ => character,
        })
        .collect();
    if is_safe(&name) && !has_drive(&name) {
        return name;
    }
    let last = name.rsplit('/').next().unwrap_or_default();
    match last {
        "" | "." | ".." => NAMELESS.to_owned(),
        _ => shortened(last),
    }
}

/// The name under which a generated file is kept: one that can be given back. `None` where it cannot be made one.
pub fn of_output(path: &std::path::Path) -> Option<String> {
    let stands = |character: char| if character == '\\' || character.is_control() { '_' } else { character };
    Some(path.to_string_lossy().chars().map(stands).collect()).filter(|name: &String| is_safe(name))
}

/// Whether a name is a relative path that stays below where it is put, and one that file systems take.
pub fn is_safe(name: &str) -> bool {
    let is_segment = |segment: &str| {
        !matches!(segment, "" | "." | "..")
            && segment.len() <= SEGMENT_BYTES_MAX
            && !segment.contains(|character: char| character == '\\' || character.is_control())
    };
    name.chars().count() <= NAME_CHARS_MAX
        && name.split('/').count() <= NAME_DEPTH_MAX
        && name.split('/').all(is_segment)
}

/// `C:/…` is absolute where it comes from.
fn has_drive(name: &str) -> bool {
    matches!(name.as_bytes(), [drive, b':', b'/', ..] if drive.is_ascii_alphabetic())
}

/// A segment cut to size, its ending kept.
fn shortened(segment: &str) -> String {
    let fits = |text: &str| text.len() <= SEGMENT_BYTES_MAX && text.chars().count() <= NAME_CHARS_MAX;
    if fits(segment) {
        return segment.to_owned();
    }
    let ending = match segment.rfind('.') {
        Some(at) if at > 0 && segment.len() - at <= ENDING_BYTES_MAX => &segment[at..],
        _ => "",
    };
    let mut end = SEGMENT_BYTES_MAX - ending.len();
    while !segment.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{ending}", &segment[..end])
}

/// The last suffix of a name, with its dot: `.gz` of `a.tar.gz`. Empty for `noext` and `.env`.
pub fn suffix(name: &str) -> &str {
    let last = name.rsplit('/').next().unwrap_or_default();
    match last.rfind('.') {
        Some(at) if at > 0 => &last[at..],
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn safe_names_are_kept_as_they_were_sent() {
        for name in [
            "data.csv",
            "pptx/SKILL.md",
            "ünïcödé-漢字-🎉.txt",
            "it's.txt",
            ".env",
            "a.b.c.tar.gz",
            "per%20cent.txt",
            "(1) copy [x].txt",
            "...",
            "a..b",
            " ",
            "semi;colon,comma.txt",
            "\u{202e}gpj.exe",
            &"ä".repeat(127),
        ] {
            assert_eq!(of_upload(name), name);
        }
    }

    #[test]
    fn hostile_names_become_harmless() {
        for (raw, name) in [
            ("/etc/passwd", "passwd"),
            ("../../escape.txt", "escape.txt"),
            ("a/../../b.txt", "b.txt"),
            ("a/./b.txt", "b.txt"),
            ("a//b.txt", "b.txt"),
            ("C:\\Users\\me\\data.csv", "data.csv"),
            ("dir\\data.csv", "dir/data.csv"),
            ("..\\..\\x", "x"),
            ("a\0b\n\t\u{7f}\u{85}.txt", "a_b____.txt"),
            ("", "upload"),
            (".", "upload"),
            ("..", "upload"),
            ("/", "upload"),
            ("a/..", "upload"),
            ("a/", "upload"),
            ("1/2/3/4/5/6/7/8/9/10/11.txt", "11.txt"),
        ] {
            assert_eq!(of_upload(raw), name, "{raw:?}");
        }
        let long = of_upload(&format!("{}.tar.gz", "漢".repeat(200)));
        assert!(long.len() <= SEGMENT_BYTES_MAX && long.ends_with("漢.gz"), "{long}");
        assert!(of_upload(&"x".repeat(5000)).len() == SEGMENT_BYTES_MAX);
        assert!(of_upload(&format!(".{}", "x".repeat(5000))).len() == SEGMENT_BYTES_MAX);
    }

    #[test]
    fn what_a_program_calls_a_file_can_be_given_back() {
        use std::os::unix::ffi::OsStrExt;
        let of = |bytes: &[u8]| of_output(std::path::Path::new(std::ffi::OsStr::from_bytes(bytes)));
        for (raw, name) in [
            (&b"out/a b.txt"[..], Some("out/a b.txt")),
            (b"a\\b\n\x07.txt", Some("a_b__.txt")),
            (b"caf\xe9.txt", Some("caf\u{fffd}.txt")),
            (&[0xe9; 100], None),
        ] {
            assert_eq!(of(raw).as_deref(), name, "{raw:?}");
        }
    }

    #[test]
    fn the_suffix_is_the_last_one_of_the_file() {
        for (name, it) in [
            ("a.tar.gz", ".gz"),
            ("a.b/c", ""),
            (".env", ""),
            ("d/.env", ""),
            ("a.", "."),
            ("räport.v2.txt", ".txt"),
        ] {
            assert_eq!(suffix(name), it, "{name}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_the_name_is_safe_and_stays(
            raw in prop_oneof![any::<String>(), "([./\\\\a-c\u{0}\n:]|\\.\\.){0,40}", "[漢/.]{0,600}"]
        ) {
            let name = of_upload(&raw);
            prop_assert!(is_safe(&name), "{:?}", name);
            prop_assert_eq!(of_upload(&name), name.clone(), "it is its own name");
            // Where a kernel would put it.
            let place = std::path::Path::new("/mnt/data").join(&name);
            let below = place.components().all(|it| !matches!(it, std::path::Component::ParentDir));
            prop_assert!(below && place.starts_with("/mnt/data") && place != std::path::Path::new("/mnt/data"));
        }

        #[test]
        fn a_safe_name_without_a_drive_is_never_changed(name in "[^/\\\\\\p{Cc}:.]{1,20}(/[^/\\\\\\p{Cc}:.]{1,20}){0,3}") {
            prop_assume!(is_safe(&name));
            prop_assert_eq!(of_upload(&name), name);
        }
    }
}
