//! The fast reader of JSON headers returns the result of the reference reader, or leaves the header to it. The input is
//! the JSON.
#![no_main]

use ingot_format::fuzzing::quick_equals_reference;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(difference) = quick_equals_reference(text) {
        panic!("{difference}");
    }
});
