//! No answer of a server makes the HTTP client panic, and every answer that it accepts is read in the same way by
//! hyper.
#![no_main]

#[path = "../../remote/tests/of_hyper/mod.rs"]
mod of_hyper;

use ingot_remote::fuzzing::answer;
use libfuzzer_sys::fuzz_target;
use of_hyper::of_hyper;

fuzz_target!(|input: &[u8]| {
    match answer(input) {
        Ok(Some(ours)) => match of_hyper(input) {
            Ok(theirs) => assert_eq!(ours, theirs),
            Err(fault) => panic!("accepted here, refused by hyper: {fault}; here {ours:?}"),
        },
        Ok(None) => {}
        Err(fault) => {
            let message = fault.to_string();
            assert!(!message.chars().any(char::is_control), "{message:?}");
        }
    }
});
