//! One row of call frame information → one [`Rule`].

use gimli::{
    CfaRule, EhFrame, Encoding, EndianSlice, LittleEndian, Operation, Register, RegisterRule,
    UnwindExpression, UnwindTableRow,
};
use tracer_abi::unwind::{Rule, cfa, rbp};

pub(super) type Reader<'data> = EndianSlice<'data, LittleEndian>;

/// DWARF numbers of registers (x86-64 psABI, figure 3.36).
const RBP: Register = Register(6);
const RSP: Register = Register(7);
const RETURN_ADDRESS: Register = Register(16);

pub(super) const UNSUPPORTED: Rule = of(cfa::UNSUPPORTED);
pub(super) const NO_FUNCTION: Rule = of(cfa::NONE);
pub(super) const SIGNAL: Rule = of(cfa::SIGNAL);
pub(super) const END: Rule = of(cfa::END);

pub(super) const fn of(cfa: u8) -> Rule {
    Rule { cfa, rbp: rbp::SAME, register: 0, cfa_offset: 0, cfa_offset2: 0, rbp_offset: 0 }
}

/// What a row says, exactly; [`UNSUPPORTED`] where a rule cannot.
pub(super) fn rule(row: &UnwindTableRow<usize>, section: &EhFrame<Reader<'_>>, encoding: Encoding) -> Rule {
    match row.register(RETURN_ADDRESS) {
        Some(RegisterRule::Offset(-8)) => {}
        Some(RegisterRule::Undefined) => return END,
        _ => return UNSUPPORTED,
    }
    let frame = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => by_register(*register, *offset),
        CfaRule::Expression(expression) => by_expression(expression, section, encoding),
    };
    let Some(frame) = frame else { return UNSUPPORTED };
    let (rbp, offset) = match row.register(RBP) {
        None | Some(RegisterRule::SameValue) => (rbp::SAME, Some(0)),
        Some(RegisterRule::Offset(offset)) => (rbp::AT_CFA, i32::try_from(offset).ok()),
        Some(RegisterRule::Expression(expression)) => {
            match operations(&expression, section, encoding).as_deref() {
                Some([Operation::RegisterOffset { register: RBP, offset, .. }]) => {
                    (rbp::AT_RBP, i32::try_from(*offset).ok())
                }
                _ => (rbp::LOST, Some(0)),
            }
        }
        Some(_) => (rbp::LOST, Some(0)),
    };
    match offset {
        Some(rbp_offset) => Rule { rbp, rbp_offset, ..frame },
        None => Rule { rbp: rbp::LOST, ..frame },
    }
}

/// Whether the function keeps rax and rdx for its caller, which only one that leaves for an exception's handler does: it
/// hands over what was thrown in them.
pub(super) fn leaves_for_handler(row: &UnwindTableRow<usize>) -> bool {
    [Register(0), Register(1)]
        .iter()
        .all(|register| matches!(row.register(*register), Some(RegisterRule::Offset(_))))
}

fn by_register(register: Register, offset: i64) -> Option<Rule> {
    let cfa = match register {
        RSP => cfa::RSP,
        RBP => cfa::RBP,
        // Those that the kernel saves of user space.
        Register(0..=15) => cfa::REGISTER,
        _ => return None,
    };
    let register = if cfa == cfa::REGISTER { register.0 } else { 0 };
    Some(Rule { register, cfa_offset: i32::try_from(offset).ok()?, ..of(cfa) })
}

/// The expressions that compilers and linkers emit: realigned stacks and procedure linkage tables.
fn by_expression(
    expression: &UnwindExpression<usize>,
    section: &EhFrame<Reader<'_>>,
    encoding: Encoding,
) -> Option<Rule> {
    let operations = operations(expression, section, encoding)?;
    let [Operation::RegisterOffset { register, offset, .. }, rest @ ..] = operations.as_slice() else {
        return None;
    };
    if let (RSP, 8, [ip, _, Operation::And, threshold, Operation::Ge, _, Operation::Shl, Operation::Plus]) =
        (*register, *offset, rest)
    {
        // rsp + 8 + (((rip & 15) >= threshold) << 3)
        let is_plt = matches!(ip, Operation::RegisterOffset { register: RETURN_ADDRESS, offset: 0, .. })
            && matches!(rest[1], Operation::UnsignedConstant { value: 15 })
            && matches!(rest[5], Operation::UnsignedConstant { value: 3 });
        let Operation::UnsignedConstant { value } = threshold else { return None };
        return is_plt.then_some(Rule { cfa_offset: i32::try_from(*value).ok()?, ..of(cfa::PLT) });
    }
    let kind = match *register {
        RBP => cfa::AT_RBP,
        RSP => cfa::AT_RSP,
        _ => return None,
    };
    let further = match rest {
        [Operation::Deref { size: 8, space: false, .. }] => 0,
        [Operation::Deref { size: 8, space: false, .. }, Operation::PlusConstant { value }] => *value,
        _ => return None,
    };
    let cfa_offset = i32::try_from(*offset).ok()?;
    Some(Rule { cfa_offset, cfa_offset2: i32::try_from(further).ok()?, ..of(kind) })
}

/// The operations of an expression, if they are no more than any that is understood has.
fn operations<'data>(
    expression: &UnwindExpression<usize>,
    section: &EhFrame<Reader<'data>>,
    encoding: Encoding,
) -> Option<Vec<Operation<Reader<'data>>>> {
    const MOST: usize = 9;
    let mut iterator = expression.get(section).ok()?.operations(encoding);
    let mut operations = Vec::with_capacity(MOST);
    while let Some(operation) = iterator.next().ok()? {
        if operations.len() == MOST {
            return None;
        }
        operations.push(operation);
    }
    Some(operations)
}
