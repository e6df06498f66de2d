/* Marks: how a program tells the tracer what a request is. Link with -ltracer_marks; docs/marks.md explains.
 *
 * While nobody listens every function returns after about 1 ns (and the call). Nothing here blocks, allocates, takes a
 * lock, makes a system call or fails: marks may be made anywhere, also in signal handlers and after fork(). Every
 * pointer may be null (an empty string, an empty batch, a request of which nothing is known). Strings are UTF-8 (other
 * bytes are replaced), end with NUL, and are cut after 256 bytes.
 */
#ifndef TRACER_MARKS_H
#define TRACER_MARKS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What is known of a request when it is taken in. Unknown: null or zero; what becomes known later is told by
 * tracer_mark_attr_string or tracer_mark_attr_number, with the field's name as key. */
struct tracer_request_begin {
    uint64_t request;         /* the program's own number, unique in the process while the request lives */
    uint64_t received_ns;     /* CLOCK_MONOTONIC ns at which it was received; 0: now */
    uint8_t trace_id[16];     /* W3C trace context */
    uint8_t span_id[8];
    uint32_t trace_flags;
    uint32_t prompt_tokens;
    const char *request_id;   /* the id used outside, for instance X-Request-ID */
    const char *tenant_id;
    const char *model;
    const char *model_version;
    const char *engine_hash;       /* digest of the engine file (hexadecimal) */
    const char *adapters;          /* names of the adapters (LoRA), separated by commas */
    const char *kv_cache_strategy; /* how its KV cache is kept, in the program's own words: paged, prefix, … */
};

enum tracer_finish_reason {
    TRACER_FINISH_UNKNOWN = 0,
    TRACER_FINISH_STOP = 1,
    TRACER_FINISH_LENGTH = 2,
    TRACER_FINISH_CANCELLED = 3,
    TRACER_FINISH_ERROR = 4
};

enum tracer_slot_phase { TRACER_PREFILL = 0, TRACER_DECODE = 1 };

/* Slot flag: this step yields no token for the slot (a chunk of a longer prefill). */
#define TRACER_SLOT_NO_TOKEN 1

/* One request in a batch. */
struct tracer_slot {
    uint64_t request;
    uint32_t sample_offset;   /* position of the request in the batch's tensors */
    uint32_t generation_step; /* index of the token that this step generates (0 for the prefill) */
    uint32_t tokens;          /* tokens that the step processes for this request */
    uint16_t choice;
    uint8_t phase;            /* enum tracer_slot_phase */
    uint8_t flags;            /* TRACER_SLOT_NO_TOKEN */
};

/* Whether a tracer listens now: 1 or 0. */
int tracer_mark_listening(void);

/* The program took a request in. */
void tracer_mark_request_begin(const struct tracer_request_begin *begin);

/* The program is done with a request; output_tokens counts the tokens of all choices; finish_reason is an
 * enum tracer_finish_reason. */
void tracer_mark_request_end(uint64_t request, uint32_t output_tokens, uint32_t finish_reason);

/* The next step of this thread serves these requests. batch_id numbers the iteration, unique in the process: the steps
 * of several ranks of one iteration share it. */
void tracer_mark_batch(uint64_t batch_id, uint32_t rank, const struct tracer_slot *slots, size_t slot_count);

/* The program hands token `index` (from 0) of a choice to its client. */
void tracer_mark_token(uint64_t request, uint32_t choice, uint32_t index);

/* A named part of a request's life begins, or ends. */
void tracer_mark_phase_begin(uint64_t request, const char *name);
void tracer_mark_phase_end(uint64_t request, const char *name);

/* A fact about one choice of a request. */
void tracer_mark_attr_number(uint64_t request, uint32_t choice, const char *key, double value);
void tracer_mark_attr_string(uint64_t request, uint32_t choice, const char *key, const char *value);

#ifdef __cplusplus
}
#endif

#endif
