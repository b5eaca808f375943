// Runs the system calls of its arguments, see SYSCALLS in tests/exec_attacks.py.
extern "C" {
    fn syscall(number: i64, ...) -> i64;
}

fn main() {
    for row in std::env::args().skip(1) {
        let fields: Vec<&str> = row.split('|').collect();
        let number: i64 = fields[1].parse().expect("a number");
        let mut kept: Vec<Vec<u8>> = Vec::new();
        let mut values = [0i64; 6];
        for (value, field) in values.iter_mut().zip(&fields[3..]) {
            // @text, or # for a page of zeros
            *value = field.parse().unwrap_or_else(|_| {
                let mut bytes = field.as_bytes()[1..].to_vec();
                bytes.resize(4096, 0);
                kept.push(bytes);
                kept.last_mut().expect("pushed").as_mut_ptr() as i64
            });
        }
        let [a, b, c, d, e, f] = values;
        let got = unsafe { syscall(number, a, b, c, d, e, f) };
        let errno = if got < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 };
        let refused = fields[2].split(',').any(|it| it == errno.to_string());
        let outcome = if refused { "blocked" } else { "escaped" };
        println!(
            "{{\"attack\": \"{}\", \"outcome\": \"{outcome}\", \"detail\": \"{got}, errno {errno}\"}}",
            fields[0]
        );
    }
}
