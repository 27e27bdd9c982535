//! Writers that fill one file together agree on who owns which bytes, and agree with a model, regardless of who reads
//! the journal and when. Records that none of them wrote are an error for all.
#![no_main]

mod folder;

use folder::place;
use ingot_io::fuzzing::{Step, run};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let steps = steps(&mut Unstructured::new(input)).unwrap_or_default();
    let path = place("journal");
    let ran = run(&path, &steps);
    let _ = std::fs::remove_file(&path);
    if let Err(difference) = ran {
        panic!("{difference}\nof {steps:?}");
    }
});

fn steps(input: &mut Unstructured<'_>) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    while !input.is_empty() && steps.len() < 40 {
        let who = input.arbitrary()?;
        steps.push(match input.int_in_range(0..=15)? {
            0..=3 => Step::Claim(who, ranges(input)?),
            4 => Step::Claim(who, vec![(0, 47)]),
            5..=8 => Step::Done(who, input.arbitrary()?),
            9 => Step::Failed(who, input.arbitrary()?),
            10 => Step::Commit(who),
            11 => Step::Abandon(who),
            12 => Step::TakeOver(who),
            13 => Step::Look(who),
            14 => Step::Forge(word(input)?, word(input)?, words(input)?),
            _ => Step::Scribble(input.arbitrary()?),
        });
    }
    Ok(steps)
}

fn ranges(input: &mut Unstructured<'_>) -> Result<Vec<(u8, u8)>> {
    let mut ranges = Vec::new();
    for _ in 0..input.int_in_range(0..=4)? {
        ranges.push((input.int_in_range(0..=48)?, input.int_in_range(0..=15)?));
    }
    Ok(ranges)
}

fn words(input: &mut Unstructured<'_>) -> Result<Vec<[u64; 3]>> {
    let mut words = Vec::new();
    for _ in 0..input.int_in_range(0..=3)? {
        words.push([word(input)?, word(input)?, word(input)?]);
    }
    Ok(words)
}

/// A small number, or any number.
fn word(input: &mut Unstructured<'_>) -> Result<u64> {
    match input.ratio(7, 8)? {
        true => input.int_in_range(0..=60),
        false => input.arbitrary(),
    }
}
